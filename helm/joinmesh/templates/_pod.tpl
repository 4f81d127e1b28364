{{/* What every pod shares: who it runs as, what it may do, where its files lie. All of it meets the restricted standard. */}}

{{/* (list . settings component) */}}
{{- define "joinmesh.pod" -}}
{{- $root := first . -}}{{- $settings := index . 1 -}}
serviceAccountName: {{ include "joinmesh.name" (list $root (index . 2)) }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Image, rights and resources of a container: (list . image settings) */}}
{{- define "joinmesh.container" -}}
image: {{ include "joinmesh.image" (list (first .) (index . 1)) | quote }}
imagePullPolicy: {{ (index . 1).pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
resources:
  requests:
    cpu: {{ (index . 2).resources.requests.cpu | quote }}
    memory: {{ (index . 2).resources.requests.memory | quote }}
  limits:
    memory: {{ (index . 2).resources.limits.memory | quote }}
    {{- with (index . 2).resources.limits.cpu }}
    cpu: {{ . | quote }}
    {{- end }}
{{- end -}}

{{- define "joinmesh.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: HOME
  value: /tmp
- name: JOINMESH_LOG
  value: {{ .Values.logLevel }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether a service has Kafka secrets, and which: (list . service name) */}}
{{- define "joinmesh.secret" -}}
{{- $kafka := (first .).Values.kafka -}}
{{- get $kafka.secrets (index . 1) | default $kafka.existingSecret -}}
{{- end -}}

{{/* (list . service name) */}}
{{- define "joinmesh.mounts" -}}
{{- $root := first . -}}
- name: mesh
  mountPath: /etc/joinmesh/mesh.yaml
  subPath: mesh.yaml
  readOnly: true
{{- if or (include "joinmesh.secret" .) $root.Values.kafka.caSecret }}
- name: kafka
  mountPath: /etc/joinmesh/kafka
  readOnly: true
{{- end }}
- name: tmp
  mountPath: /tmp
{{- end -}}

{{/* (list . service name config-map size-of-tmp) */}}
{{- define "joinmesh.volumes" -}}
{{- $root := first . -}}{{- $secret := include "joinmesh.secret" . -}}
- name: mesh
  configMap:
    name: {{ index . 2 }}
{{- if or $secret $root.Values.kafka.caSecret }}
- name: kafka
  projected:
    defaultMode: 288
    sources:
      {{- with $secret }}
      - secret:
          name: {{ . }}
      {{- end }}
      {{- with $root.Values.kafka.caSecret }}
      - secret:
          name: {{ . }}
          items:
            - key: ca.crt
              path: ca.crt
      {{- end }}
{{- end }}
- name: tmp
  emptyDir:
    sizeLimit: {{ index . 3 }}
{{- end -}}
