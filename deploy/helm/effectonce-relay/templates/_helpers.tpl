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

{{- define "relay.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "relay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The password of a database, as the one file of a volume: (dict "name" … "secret" …). */ -}}
{{- define "relay.passwordVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret.name }}
    defaultMode: 0440
    items: [{key: {{ .secret.key | quote }}, path: password}]
{{- end }}

{{- /* The secret with the password of who migrates. */ -}}
{{- define "relay.migrateSecret" -}}
{{- ternary .Values.migrate.database.passwordSecret .Values.database.passwordSecret (ne .Values.migrate.database.url "") | toYaml }}
{{- end }}

{{- /* A container that brings the tables or the roles: (list $ "up"), (list $ "roles"). */ -}}
{{- define "relay.migrate" -}}
{{- $command := last . }}
{{- with first . -}}
- name: migrate-{{ $command }}
  image: {{ include "relay.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - migrate
    - {{ $command }}
    {{- if eq $command "roles" }}
    - --apply
    {{- with .Values.migrate.rolesPrefix }}
    - --prefix={{ . }}
    {{- end }}
    {{- end }}
    - --schema={{ .Values.schema }}
    - --database-url={{ default .Values.database.url .Values.migrate.database.url }}
    {{- $secret := include "relay.migrateSecret" . | fromYaml }}
    {{- if $secret.name }}
    - --database-password-file=/secrets/database/password
    {{- end }}
    {{- if .Values.insecure }}
    - --insecure
    {{- end }}
    - --log-format=json
  resources: {{- toYaml .Values.resources | nindent 4 }}
  securityContext: {{- include "relay.containerSecurity" . | nindent 4 }}
  {{- if $secret.name }}
  volumeMounts:
    - {name: database-password, mountPath: /secrets/database, readOnly: true}
  {{- end }}
{{- end }}
{{- end }}
