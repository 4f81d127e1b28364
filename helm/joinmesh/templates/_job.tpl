{{/* The pods of Spark jobs: audit and backfill. */}}

{{/* (list . settings component command…) */}}
{{- define "joinmesh.spark.pod" -}}
{{- $root := first . -}}{{- $settings := index . 1 -}}{{- $component := index . 2 -}}{{- $spark := $root.Values.audit.spark -}}
metadata:
  labels:
    {{- include "joinmesh.selector" (list $root $component) | nindent 4 }}
  {{- with $settings.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  {{- include "joinmesh.pod" (list $root $settings $component) | nindent 2 }}
  containers:
    - name: {{ $component }}
      {{- include "joinmesh.container" (list $root $root.Values.sparkImage $settings) | nindent 6 }}
      command: [joinmesh]
      args:
        {{- range slice . 3 }}
        - {{ . | quote }}
        {{- end }}
        - {{ printf "--master=%s" $spark.master | quote }}
      workingDir: /tmp
      env:
        {{- include "joinmesh.env" $root | nindent 8 }}
        - name: SPARK_CONF_DIR
          value: /etc/joinmesh/spark
        {{- if not (hasPrefix "local" $spark.master) }}
        - name: SPARK_LOCAL_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- end }}
      {{- if not (hasPrefix "local" $spark.master) }}
      ports:
        - name: driver
          containerPort: 7078
        - name: blocks
          containerPort: 7079
      {{- end }}
      volumeMounts:
        {{- include "joinmesh.mounts" (list $root "audit") | nindent 8 }}
        - name: spark
          mountPath: /etc/joinmesh/spark
          readOnly: true
        - name: reports
          mountPath: /var/lib/joinmesh
  volumes:
    {{- include "joinmesh.volumes" (list $root "audit" (include "joinmesh.name" (list $root "mesh")) $spark.scratch) | nindent 4 }}
    - name: spark
      configMap:
        name: {{ include "joinmesh.name" (list $root "spark") }}
    - name: reports
      {{- if $root.Values.audit.reportsClaim }}
      persistentVolumeClaim:
        claimName: {{ $root.Values.audit.reportsClaim }}
      {{- else }}
      emptyDir:
        sizeLimit: 256Mi
      {{- end }}
{{- end -}}

{{/* The audit's Job, on a schedule or now. */}}
{{- define "joinmesh.audit" -}}
backoffLimit: 0
activeDeadlineSeconds: {{ .Values.audit.timeoutSeconds }}
ttlSecondsAfterFinished: 604800
template:
  {{- include "joinmesh.spark.pod" (list . .Values.audit "audit" "audit" "--file=/etc/joinmesh/mesh.yaml" "--report=/var/lib/joinmesh/audit" (printf "--memory=%s" .Values.audit.spark.memory)) | nindent 2 }}
{{- end -}}
