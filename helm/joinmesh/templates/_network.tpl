{{/* Egress that every pod has: names, and Kafka on its ports. */}}
{{- define "joinmesh.egress" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $bootstrap := get .Values.mesh.kafka "bootstrap" | default (get .Values.mesh.kafka "bootstrap.servers") -}}
{{- $ports := $policy.kafkaPorts -}}
{{- if not $ports -}}
{{- range splitList "," $bootstrap -}}{{- $ports = append $ports (regexFind "[0-9]+$" (trim .) | default "9092" | int) -}}{{- end -}}
{{- end -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
- ports:
    {{- range $ports | uniq }}
    - port: {{ int . }}
      protocol: TCP
    {{- end }}
  {{- with $policy.kafkaPeers }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with $policy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
