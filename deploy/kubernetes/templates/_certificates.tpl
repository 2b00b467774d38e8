{{- define "stageline.uri" -}}
{{- $certificates := .root.Values.certificates -}}
spiffe://{{ $certificates.trustDomain }}/stageline/{{ .root.Values.name }}/{{ .role }}/{{ .identity }}
{{- end }}

{{/* DNS names of a service, or of a pod under a headless one. */}}
{{- define "stageline.hosts" -}}
{{- $root := .root }}
{{- $hosts := list }}
{{- range .names }}
{{- $hosts = concat $hosts (list . (printf "%s.%s" . $root.Release.Namespace) (printf "%s.%s.svc" . $root.Release.Namespace)) }}
{{- end }}
{{- join "," (concat $hosts (.more | default list)) }}
{{- end }}

{{/* The volume with ca.crt, tls.crt and tls.key. */}}
{{- define "stageline.certificate" -}}
{{- $certificates := .root.Values.certificates }}
{{- if eq $certificates.provider "csi" -}}
csi:
  driver: csi.cert-manager.io
  readOnly: true
  volumeAttributes:
    csi.cert-manager.io/issuer-name: {{ $certificates.issuer.name | quote }}
    csi.cert-manager.io/issuer-kind: {{ $certificates.issuer.kind | quote }}
    csi.cert-manager.io/uri-sans: {{ include "stageline.uri" . | quote }}
    csi.cert-manager.io/dns-names: {{ .hosts | quote }}
    csi.cert-manager.io/key-usages: "digital signature,server auth,client auth"
    csi.cert-manager.io/key-encoding: PKCS8
    csi.cert-manager.io/duration: {{ $certificates.duration }}
    csi.cert-manager.io/fs-group: {{ .root.Values.user | quote }}
{{- else if eq .role "worker" -}}
# A directory for each pod.
projected:
  defaultMode: 0440
  sources:
    {{- $set := .set }}
    {{- range $ordinal := until (int .process.replicas) }}
    - secret:
        name: {{ $set }}-{{ $ordinal }}-tls
        items:
          {{- range list "ca.crt" "tls.crt" "tls.key" }}
          - {key: {{ . }}, path: {{ $set }}-{{ $ordinal }}/{{ . }}}
          {{- end }}
    {{- end }}
{{- else -}}
secret: {secretName: {{ .set }}-tls, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* A certificate whose Secret cert-manager writes and renews. */}}
{{- define "stageline.issued" }}
{{- $certificates := .root.Values.certificates }}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .identity }}
  {{- include "stageline.metadata" (dict "root" .root "role" .role) | nindent 2 }}
spec:
  secretName: {{ .identity }}-tls
  issuerRef: {name: {{ $certificates.issuer.name }}, kind: {{ $certificates.issuer.kind }}, group: cert-manager.io}
  duration: {{ $certificates.duration }}
  privateKey: {algorithm: ECDSA, size: 256, encoding: PKCS8, rotationPolicy: Always}
  usages: [digital signature, server auth, client auth]
  uris: [{{ include "stageline.uri" . | quote }}]
  dnsNames:
    {{- range splitList "," .hosts }}
    - {{ . }}
    {{- end }}
{{- end }}
