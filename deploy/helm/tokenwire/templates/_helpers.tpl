{{- /* Made by deploy/helm/generate.py */}}
{{- define "tokenwire.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- define "tokenwire.configuration" -}}
model-{{ toYaml (list .Values.model .Values.modelDownload.source) | sha256sum | trunc 10 }}
{{- end }}
