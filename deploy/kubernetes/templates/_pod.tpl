{{/* Parts that all pods share. Arguments: root (the root context), role, process (its values), service (the
     headless service of its names, or ""), coordinator (the coordinator's host name), tls (its directory). */}}

{{- define "stageline.labels" -}}
app.kubernetes.io/name: stageline
app.kubernetes.io/instance: {{ .root.Values.name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .group }}
stageline/group: {{ . }}
{{- end }}
{{- end }}

{{- define "stageline.metadata" -}}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "stageline.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: a drain, the end of the process, and the pause of a gateway. */}}
{{- define "stageline.grace" -}}
{{ add .root.Values.drainTimeout 30 (eq .role "gateway" | ternary .root.Values.endpointRemoval 0) }}
{{- end }}

{{- define "stageline.pod" -}}
automountServiceAccountToken: false
# Variables of services would have the names of Stageline's own: STAGELINE_COORDINATOR_PORT.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "stageline.grace" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.user }}
  runAsGroup: {{ .root.Values.user }}
  # Secrets belong to root and this group. Else files of a volume would become readable for the group again
  # at each start, and files with secrets are refused then.
  fsGroup: {{ .root.Values.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .process.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .process.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .process.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .process.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "stageline.spread" -}}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: {{ .root.Values.spread }}
    labelSelector:
      matchLabels:
        {{- include "stageline.labels" . | nindent 8 }}
{{- end }}

{{- define "stageline.container" -}}
name: {{ .role }}
image: {{ .root.Values.image | quote }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
command: [stageline]
args:
  {{- toYaml .process.args | nindent 2 }}
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- if .service }}
  - {name: POD_HOST, value: {{ printf "$(POD_NAME).%s" .service | quote }}}
  {{- end }}
  - {name: COORDINATOR_HOST, value: {{ .coordinator | quote }}}
  {{- if .tls }}
  - {name: TLS_DIR, value: {{ .tls | quote }}}
  {{- end }}
  - {name: HOME, value: /var/lib/stageline}
  - {name: XDG_STATE_HOME, value: /var/lib/stageline}
  - {name: XDG_CACHE_HOME, value: /var/cache/stageline}
  {{- range $name, $value := .root.Values.environment }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
ports:
  {{- range $name, $port := .process.ports }}
  - {name: {{ $name }}, containerPort: {{ $port }}}
  {{- end }}
resources:
  {{- toYaml .process.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- include "stageline.probes" . }}
volumeMounts:
  - {name: state, mountPath: /var/lib/stageline}
  - {name: cache, mountPath: /var/cache/stageline}
  - {name: tmp, mountPath: /tmp}
  {{- if .tls }}
  - {name: {{ .volume | default "tls" }}, mountPath: /etc/stageline/tls, readOnly: true}
  {{- end }}
  {{- range .process.files }}
  - {name: {{ .name }}, mountPath: {{ .mountPath }}, readOnly: true}
  {{- end }}
  {{- if and .root.Values.model (ne .role "gateway") }}
  - {name: model, mountPath: {{ .root.Values.model.path | quote }}, readOnly: true}
  {{- end }}
{{- end }}

{{/* A process that loads is alive. A gateway answers on its own port, with TLS if it has a certificate. */}}
{{- define "stageline.probes" }}
{{- $port := eq .role "gateway" | ternary "http" "health" }}
{{- $live := eq .role "gateway" | ternary "/health" "/healthz" }}
{{- $scheme := and (eq .role "gateway") (.tls | empty | not) | ternary "HTTPS" "HTTP" }}
{{- $probes := .root.Values.probes }}
startupProbe:
  httpGet: {path: {{ $live }}, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ div (add $probes.startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: {{ $live }}, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ $probes.livenessFailures }}
readinessProbe:
  httpGet: {path: /readyz, port: {{ $port }}, scheme: {{ $scheme }}}
  periodSeconds: {{ $probes.readinessPeriodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: 2
{{- if eq .role "gateway" }}
lifecycle:
  # New connections still arrive until every node has removed the endpoint.
  preStop: {sleep: {seconds: {{ .root.Values.endpointRemoval }}}}
{{- end }}
{{- end }}

{{/* Volumes other than the state's. */}}
{{- define "stageline.volumes" -}}
- {name: cache, emptyDir: {sizeLimit: {{ .root.Values.cacheSize }}}}
- {name: tmp, emptyDir: {sizeLimit: {{ .root.Values.tmpSize }}}}
{{- if .tls }}
- name: tls
  {{- include "stageline.certificate" . | nindent 2 }}
{{- end }}
{{- range .process.files }}
- {name: {{ .name }}, secret: {secretName: {{ .secret }}, defaultMode: 0440}}
{{- end }}
{{- if and .root.Values.model (ne .role "gateway") }}
- name: model
  {{- toYaml .root.Values.model.volume | nindent 2 }}
{{- end }}
{{- end }}
