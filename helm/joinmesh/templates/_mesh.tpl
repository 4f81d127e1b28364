{{/* What the mesh file means for the chart: its text, and the services that it asks for. */}}

{{/* The mesh file. Helm reads a bare `on` or `off` as true or false; here they become words again. */}}
{{- define "joinmesh.mesh" -}}
{{- $mesh := deepCopy .Values.mesh -}}
{{- range $key := list "feedback" "heralds" -}}
{{- $table := get $mesh $key | default dict -}}
{{- range $query, $value := $table -}}
{{- if kindIs "bool" $value -}}{{- $_ := set $table $query (ternary "on" "off" $value) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $mesh -}}
{{- end -}}

{{/* Changes whenever pods must start anew. How many there are is not among that: a scaled service goes on. */}}
{{- define "joinmesh.checksum" -}}
{{- omit .Values.mesh "workers" "placement" | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{/* How many join nodes a query has: (list . query). A pinned plan has one for each pair of parentheses; any other plan
has one fewer than FROM has sources. `nodes` says it where this is wrong, and the check before an installation compares. */}}
{{- define "joinmesh.nodes" -}}
{{- $root := first . -}}{{- $query := index . 1 -}}
{{- $said := get $root.Values.nodes $query -}}
{{- $plan := get ($root.Values.mesh.plans | default dict) $query -}}
{{- if $said -}}{{- int $said -}}
{{- else if $plan -}}{{- regexFindAll "\\(" $plan -1 | len -}}
{{- else -}}
{{- $text := get $root.Values.mesh.queries $query -}}
{{- $text = regexReplaceAll "'[^']*'|\"[^\"]*\"|`[^`]*`|--[^\\n]*|(?s:/\\*.*?\\*/)|\\[[^\\]]*\\]" $text " " -}}
{{- range until 12 -}}{{- $text = regexReplaceAll "\\([^()]*\\)" $text " " -}}{{- end -}}
{{- $from := regexReplaceAll "(?is)^.*?\\bFROM\\b|\\bWHERE\\b.*$" $text " " -}}
{{- max 1 (regexFindAll "(?i),|\\bJOIN\\b" $from -1 | len) -}}
{{- end -}}
{{- end -}}

{{/* Every service of the mesh as JSON: name, component, resource (its object's name), query, node, workers. */}}
{{- define "joinmesh.services" -}}
{{- $root := . -}}{{- $workers := .Values.mesh.workers | default dict -}}
{{- $services := list (dict "name" "controller" "component" "controller" "module" "controller" "workers" 1) -}}
{{- $services = append $services (dict "name" "ingest" "component" "ingest" "module" "ingest" "workers" (get $workers "ingest" | default 1 | int)) -}}
{{- range $query := keys .Values.mesh.queries | sortAlpha -}}
{{- range $number := until (include "joinmesh.nodes" (list $root $query) | int) -}}
{{- $node := printf "j%d" (add1 $number) -}}
{{- $name := printf "%s.%s" $query $node -}}
{{- $services = append $services (dict "name" $name "component" "join-node" "module" "join_node" "query" $query "node" $node "workers" (get $workers $name | default (get $workers $node) | default 1 | int)) -}}
{{- end -}}
{{- $name := printf "%s.sink" $query -}}
{{- $services = append $services (dict "name" $name "component" "sink" "module" "sink" "query" $query "workers" (get $workers $name | default (get $workers "sink") | default 1 | int)) -}}
{{- end -}}
{{- $names := list -}}{{- $roles := list "sink" -}}
{{- range $service := $services -}}
{{- $names = append $names $service.name -}}{{- $roles = append $roles ($service.node | default "sink") -}}
{{- $parts := ternary (list $root (include "joinmesh.slug" ($service.query | default "q")) ($service.node | default "sink")) (list $root $service.component) (hasKey $service "query") -}}
{{- $_ := set $service "resource" (include "joinmesh.name" $parts) -}}
{{- end -}}
{{- range $name, $_ := $workers -}}
{{- if not (has $name (concat $names $roles)) -}}{{- fail (printf "mesh.workers names `%s`, which is no service of this mesh; services are %s" $name (join ", " $names)) -}}{{- end -}}
{{- end -}}
{{- toJson $services -}}
{{- end -}}

{{/* The groups of services that share a process, as JSON: name, resource, run, workers. */}}
{{- define "joinmesh.groups" -}}
{{- $root := . -}}{{- $services := include "joinmesh.services" . | fromJsonArray -}}{{- $taken := list -}}{{- $groups := list -}}
{{- $asked := .Values.host.groups -}}
{{- if eq (.Values.mesh.placement | default "per-service") "together" -}}
{{- if $asked -}}{{- fail "mesh.placement is `together`, which is one group of all: take out host.groups, or mesh.placement" -}}{{- end -}}
{{- $asked = dict "all" (list "all") -}}
{{- end -}}
{{- range $group, $run := $asked -}}
{{- $workers := 1 -}}{{- $single := false -}}
{{- range $name := $run -}}
{{- $found := false -}}
{{- range $service := $services -}}
{{- if or (eq $name "all") (eq $name $service.name) -}}
{{- $found = true -}}
{{- if has $service.name $taken -}}{{- fail (printf "host.groups names `%s` twice; a service runs in one place" $service.name) -}}{{- end -}}
{{- $taken = append $taken $service.name -}}
{{- $workers = max $workers $service.workers -}}
{{- $single = or $single (eq $service.name "controller") -}}
{{- end -}}
{{- end -}}
{{- if not $found -}}{{- fail (printf "host.groups.%s names `%s`, which is no service of this mesh" $group $name) -}}{{- end -}}
{{- end -}}
{{- if and $single (gt (int $workers) 1) -}}{{- fail (printf "the group `%s` holds the controller, of which there is one, and services with %d workers: take `workers` out, or the controller out of the group" $group (int $workers)) -}}{{- end -}}
{{- $groups = append $groups (dict "group" $group "component" "host" "name" "host" "resource" (include "joinmesh.name" (list $root $group "host")) "run" (join "," $run) "workers" $workers) -}}
{{- end -}}
{{- dict "groups" $groups "taken" $taken | toJson -}}
{{- end -}}

{{/* The services of one component that have pods of their own, as JSON: (list . component). */}}
{{- define "joinmesh.own" -}}
{{- $root := first . -}}{{- $component := index . 1 -}}{{- $own := list -}}
{{- $taken := (include "joinmesh.groups" $root | fromJson).taken -}}
{{- range include "joinmesh.services" $root | fromJsonArray -}}
{{- if and (eq .component $component) (not (has .name $taken)) -}}{{- $own = append $own . -}}{{- end -}}
{{- end -}}
{{- toJson $own -}}
{{- end -}}
