{{/* The pods of a service: one template for all of them, a StatefulSet around it for those that have a number. */}}

{{/* (list . service settings) */}}
{{- define "joinmesh.service.pod" -}}
{{- $root := first . -}}{{- $service := index . 1 -}}{{- $settings := index . 2 -}}
{{- $http := $root.Values.http -}}
metadata:
  labels:
    {{- include "joinmesh.selector" (list $root $service.component $service) | nindent 4 }}
    joinmesh/metrics: "true"
  annotations:
    joinmesh/service: {{ $service.run | default $service.name | quote }}
    checksum/mesh: {{ include "joinmesh.checksum" $root | quote }}
    {{- with $settings.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "joinmesh.pod" (list $root $settings $service.component) | nindent 2 }}
  terminationGracePeriodSeconds: {{ $root.Values.terminationGracePeriodSeconds }}
  {{- with $root.Values.topologySpread }}
  {{- if and .enabled (gt (int $service.workers) 1) }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ .topologyKey }}
      whenUnsatisfiable: {{ .whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "joinmesh.selector" (list $root $service.component $service) | nindent 10 }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ $service.component }}
      {{- include "joinmesh.container" (list $root $root.Values.image $settings) | nindent 6 }}
      command: [python, -m, services.{{ $service.module | default "host" }}]
      args:
        - --file=/etc/joinmesh/mesh.yaml
        - --data=/var/lib/joinmesh
        {{- with $service.query }}
        - --query={{ . }}
        {{- end }}
        {{- with $service.node }}
        - --node={{ . }}
        {{- end }}
        {{- with $service.run }}
        - --run={{ . }}
        {{- end }}
        {{- if ne $service.component "controller" }}
        - --instance=$(POD_NAME)
        {{- end }}
        - --health=0.0.0.0:9464
      env:
        {{- include "joinmesh.env" $root | nindent 8 }}
        {{- if $http.tokenSecret }}
        - name: JOINMESH_HTTP_TOKEN_FILE
          value: /etc/joinmesh/http/token
        {{- end }}
        {{- if $http.tlsSecret }}
        - name: JOINMESH_HTTP_CERT_FILE
          value: /etc/joinmesh/http/tls.crt
        - name: JOINMESH_HTTP_KEY_FILE
          value: /etc/joinmesh/http/tls.key
        {{- end }}
      ports:
        - name: http
          containerPort: 9464
      startupProbe:
        {{- include "joinmesh.probe" (list $root "/live") | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        {{- include "joinmesh.probe" (list $root "/live") | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 6
      readinessProbe:
        {{- include "joinmesh.probe" (list $root "/ready") | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 3
      volumeMounts:
        {{- include "joinmesh.mounts" (list $root $service.name) | nindent 8 }}
        - name: state
          mountPath: /var/lib/joinmesh
        {{- if or $http.tokenSecret $http.tlsSecret }}
        - name: http
          mountPath: /etc/joinmesh/http
          readOnly: true
        {{- end }}
  volumes:
    {{- include "joinmesh.volumes" (list $root $service.name (include "joinmesh.name" (list $root "mesh")) "256Mi") | nindent 4 }}
    {{- if not (hasKey $settings "storage") }}
    - name: state
      emptyDir:
        sizeLimit: 256Mi
    {{- end }}
    {{- if or $http.tokenSecret $http.tlsSecret }}
    - name: http
      projected:
        defaultMode: 288
        sources:
          {{- range compact (list $http.tokenSecret $http.tlsSecret) }}
          - secret:
              name: {{ . }}
          {{- end }}
    {{- end }}
{{- end -}}

{{- define "joinmesh.probe" -}}
httpGet:
  path: {{ index . 1 }}
  port: http
  {{- if (first .).Values.http.tlsSecret }}
  scheme: HTTPS
  {{- end }}
timeoutSeconds: 5
{{- end -}}

{{/* (list . service settings): the pod's ordinal is the worker's number, and so its static membership in Kafka. */}}
{{- define "joinmesh.statefulset" -}}
{{- $root := first . -}}{{- $service := index . 1 -}}{{- $settings := index . 2 -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $service.resource }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "joinmesh.labels" (list $root $service.component $service) | nindent 4 }}
spec:
  replicas: {{ $service.workers }}
  serviceName: {{ include "joinmesh.name" (list $root "metrics") }}
  podManagementPolicy: Parallel
  updateStrategy:
    type: RollingUpdate
  revisionHistoryLimit: 5
  selector:
    matchLabels:
      {{- include "joinmesh.selector" (list $root $service.component $service) | nindent 6 }}
  {{- with $settings.storage }}
  persistentVolumeClaimRetentionPolicy:
    whenDeleted: {{ .whenDeleted }}
    whenScaled: {{ .whenScaled }}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: state
        labels:
          {{- include "joinmesh.selector" (list $root $service.component $service) | nindent 10 }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .className }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .size }}
  {{- end }}
  template:
    {{- include "joinmesh.service.pod" . | nindent 4 }}
{{- end -}}

{{/* (list . service) */}}
{{- define "joinmesh.disruption" -}}
{{- $root := first . -}}{{- $service := index . 1 -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $service.resource }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "joinmesh.labels" (list $root $service.component $service) | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "joinmesh.selector" (list $root $service.component $service) | nindent 6 }}
{{- end -}}
