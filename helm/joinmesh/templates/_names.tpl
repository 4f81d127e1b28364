{{/* Names and labels. A name is unique for what it is made of and short enough for every label that Kubernetes makes of it. */}}

{{- define "joinmesh.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains $chart .Release.Name -}}
{{- include "joinmesh.short" (list .Release.Name 30) -}}
{{- else -}}
{{- include "joinmesh.short" (list (printf "%s-%s" .Release.Name $chart) 30) -}}
{{- end -}}
{{- end -}}

{{/* A text of at most n characters: as it is, or cut and with a hash of the whole. */}}
{{- define "joinmesh.short" -}}
{{- $text := index . 0 -}}{{- $most := index . 1 | int -}}
{{- if le (len $text) $most -}}{{- $text -}}
{{- else -}}{{- printf "%s-%s" ($text | trunc (int (sub $most 7)) | trimSuffix "-") ($text | sha256sum | trunc 6) -}}
{{- end -}}
{{- end -}}

{{/* The name of an object: (list . "audit") is <fullname>-audit. 50 leaves room for what a StatefulSet appends. */}}
{{- define "joinmesh.name" -}}
{{- $parts := prepend (rest .) (include "joinmesh.fullname" (first .)) -}}
{{- include "joinmesh.short" (list (join "-" $parts) 50) -}}
{{- end -}}

{{/* A query's name as part of a DNS name. `_` becomes `-`, which no query's name has; where more is lost, a hash is added. */}}
{{- define "joinmesh.slug" -}}
{{- $plain := . | lower | replace "_" "-" -}}
{{- if or (ne . (lower .)) (hasPrefix "_" .) (hasSuffix "_" .) -}}
{{- $plain = printf "%s-%s" (trimAll "-" $plain | default "q") (sha256sum . | trunc 6) -}}
{{- end -}}
{{- include "joinmesh.short" (list $plain 30) -}}
{{- end -}}

{{/* Labels that never change: selectors and volume claims hold them. (list . component) or (list . component service) */}}
{{- define "joinmesh.selector" -}}
app.kubernetes.io/name: {{ (first .).Chart.Name }}
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- with (dig "query" "" (index (append . dict) 2)) }}
joinmesh/query: {{ include "joinmesh.slug" . | quote }}
{{- end }}
{{- with (dig "node" "" (index (append . dict) 2)) }}
joinmesh/node: {{ . | quote }}
{{- end }}
{{- with (dig "group" "" (index (append . dict) 2)) }}
joinmesh/group: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "joinmesh.labels" -}}
{{ include "joinmesh.selector" . }}
app.kubernetes.io/version: {{ (first .).Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ (first .).Values.mesh.mesh | trimAll "-_" | quote }}
app.kubernetes.io/managed-by: {{ (first .).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (first .).Chart.Name (first .).Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "joinmesh.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}{{ $image.repository }}@{{ $image.digest }}
{{- else -}}{{ $image.repository }}:{{ $image.tag | default (first .).Chart.AppVersion }}
{{- end -}}
{{- end -}}
