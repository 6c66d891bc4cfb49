{{- define "relay.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "relay.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "relay.labels" -}}
{{ include "relay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "relay.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ $tag }}{{ end }}
{{- end }}

{{- /* Labels of the pods of another part than the relay, such as (list $ "operator"): neither the relay's budget nor its spread counts them. */ -}}
{{- define "relay.partSelector" -}}
app.kubernetes.io/name: {{ (first .).Chart.Name }}-{{ last . }}
app.kubernetes.io/instance: {{ (first .).Release.Name }}
{{- end }}

{{- define "relay.partLabels" -}}
{{ include "relay.partSelector" . }}
{{ include "relay.labels" (first .) | splitList "\n" | rest | rest | join "\n" }}
{{- end }}

{{- /* The database as the owner of the tables connects to it. */ -}}
{{- define "relay.owner" -}}
{{- ternary .Values.migrate.database .Values.database (ne .Values.migrate.database.url "") | toYaml }}
{{- end }}

{{- /* The metadata of pods: (list $ LABELS). */ -}}
{{- define "relay.podMetadata" -}}
{{- with (first .).Values -}}
labels:
  {{- last $ | nindent 2 }}
  {{- with .podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with .podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
All pods are made of the next three: what a pod may do is said here only. They take a dict:
root; name and args of the container; database: with url and passwordSecret; kafka: whether the pod connects to it, too;
env: further variables.
*/ -}}
{{- define "relay.pod" -}}
{{- with .root.Values -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  {{- with $.database.passwordSecret }}
  {{- if .name }}
  {{- include "relay.passwordVolume" (dict "name" "database-password" "secret" .) | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- if $.kafka }}
  {{- if .kafka.sasl.mechanism }}
  {{- include "relay.passwordVolume" (dict "name" "kafka-password" "secret" .kafka.sasl.passwordSecret) | nindent 2 }}
  {{- end }}
  {{- if and .kafka.tls.enabled .kafka.tls.secret }}
  - name: kafka-tls
    secret: {secretName: {{ .kafka.tls.secret }}, defaultMode: 0440}
  {{- end }}
  {{- end }}
  {{- with .extraVolumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "relay.container" -}}
{{- with .root.Values -}}
name: {{ $.name }}
image: {{ include "relay.image" $.root }}
imagePullPolicy: {{ .image.pullPolicy }}
args: {{- toYaml $.args | nindent 2 }}
{{- /* In the environment, so that "kubectl exec … -- /outbox-relay status" needs no flag. */}}
env: {{- include "relay.env" $ | nindent 2 }}
resources: {{- toYaml .resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: tmp, mountPath: /tmp} # for "verify"
  {{- if $.database.passwordSecret.name }}
  - {name: database-password, mountPath: /secrets/database, readOnly: true}
  {{- end }}
  {{- if $.kafka }}
  {{- if .kafka.sasl.mechanism }}
  - {name: kafka-password, mountPath: /secrets/kafka, readOnly: true}
  {{- end }}
  {{- if and .kafka.tls.enabled .kafka.tls.secret }}
  - {name: kafka-tls, mountPath: /secrets/kafka-tls, readOnly: true}
  {{- end }}
  {{- end }}
  {{- with .extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}

{{- define "relay.env" -}}
{{- with .root.Values -}}
- {name: TMPDIR, value: /tmp}
{{- with include "relay.memoryBytes" $.root }}
- {name: GOMEMLIMIT, value: {{ . | quote }}}
{{- end }}
- {name: OUTBOX_RELAY, value: {{ .relay | quote }}}
- {name: OUTBOX_SCHEMA, value: {{ .schema | quote }}}
- {name: OUTBOX_DATABASE_URL, value: {{ $.database.url | quote }}}
{{- if $.database.passwordSecret.name }}
- {name: OUTBOX_DATABASE_PASSWORD_FILE, value: /secrets/database/password}
{{- end }}
{{- if $.kafka }}
- {name: OUTBOX_BROKERS, value: {{ join "," .kafka.brokers | quote }}}
{{- with .kafka.tls }}
{{- if .enabled }}
- {name: OUTBOX_KAFKA_TLS, value: "true"}
{{- with .caKey }}
- {name: OUTBOX_KAFKA_CA_FILE, value: "/secrets/kafka-tls/{{ . }}"}
{{- end }}
{{- if .certKey }}
- {name: OUTBOX_KAFKA_CERT_FILE, value: "/secrets/kafka-tls/{{ .certKey }}"}
- {name: OUTBOX_KAFKA_KEY_FILE, value: "/secrets/kafka-tls/{{ .keyKey }}"}
{{- end }}
{{- end }}
{{- end }}
{{- with .kafka.sasl }}
{{- if .mechanism }}
- {name: OUTBOX_KAFKA_SASL_MECHANISM, value: {{ .mechanism | quote }}}
- {name: OUTBOX_KAFKA_USERNAME, value: {{ .username | quote }}}
- {name: OUTBOX_KAFKA_PASSWORD_FILE, value: /secrets/kafka/password}
{{- end }}
{{- end }}
{{- end }}
- {name: OUTBOX_LOG_LEVEL, value: {{ .logLevel | quote }}}
- {name: OUTBOX_LOG_FORMAT, value: json}
{{- if .insecure }}
- {name: OUTBOX_INSECURE, value: "true"}
{{- end }}
{{- with $.env }}{{ toYaml . | nindent 0 }}{{ end }}
{{- with .extraEnv }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}
{{- end }}

{{- /* What goMemLimitPercent of the limit of memory is; empty: there is no limit. */ -}}
{{- define "relay.memoryBytes" -}}
{{- $limit := dig "limits" "memory" "" (default dict .Values.resources) }}
{{- if and $limit .Values.goMemLimitPercent }}
{{- $number := regexFind "^[0-9.]+" $limit }}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- mulf $number (get $units (trimPrefix $number $limit) | default 1) (divf .Values.goMemLimitPercent 100) | printf "%.0f" }}
{{- end }}
{{- end }}

{{- /* The password of a database, as the one file of a volume: (dict "name" … "secret" …). */ -}}
{{- define "relay.passwordVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret.name }}
    defaultMode: 0440
    items: [{key: {{ .secret.key | quote }}, path: password}]
{{- end }}

{{- /* What pods connect to: DNS, the brokers, and databases by their URLs: (list $ URL…). */ -}}
{{- define "relay.egress" -}}
{{- $values := (first .).Values }}
{{- $ports := concat $values.networkPolicy.databasePorts $values.networkPolicy.kafkaPorts }}
{{- range rest . }}
{{- range regexReplaceAll "^[a-z]+://([^@/]*@)?([^/?]*).*$" . "${2}" | splitList "," }}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "5432") }}
{{- end }}
{{- end }}
{{- range $values.kafka.brokers }}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "9092") }}
{{- end -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
    {{- $strings := list }}
    {{- range $ports }}{{ $strings = append $strings (toString .) }}{{ end }}
    {{- range $strings | uniq | sortAlpha }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}
