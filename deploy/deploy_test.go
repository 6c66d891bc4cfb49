package deploy_test

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// metricNames are the metrics that "outbox-relay run" exports, without those of Go and of the
// process.
var metricNames = map[string]bool{
	"effectonce_outbox_oldest_pending_age_seconds":     true,
	"effectonce_outbox_pending_messages":               true,
	"effectonce_outbox_messages_dispatched_total":      true,
	"effectonce_outbox_delivery_lag_seconds":           true,
	"effectonce_outbox_dead_messages":                  true,
	"effectonce_outbox_messages_dead_total":            true,
	"effectonce_outbox_shards":                         true,
	"effectonce_outbox_shards_owned":                   true,
	"effectonce_outbox_shards_hung":                    true,
	"effectonce_outbox_kafka_away":                     true,
	"effectonce_outbox_lease_changes_total":            true,
	"effectonce_outbox_interruptions_total":            true,
	"effectonce_outbox_paused_topics":                  true,
	"effectonce_outbox_table_bytes":                    true,
	"effectonce_outbox_relay_truncate_waiting_seconds": true,
	"effectonce_outbox_backlog_over_limit":             true,
	"effectonce_outbox_oldest_transaction_age_seconds": true,
	"effectonce_outbox_oldest_overdue_age_seconds":     true,
	"effectonce_idempotency_keys":                      true,
	"effectonce_oldest_unfinished_key_age_seconds":     true,
	"effectonce_parked_messages":                       true,
	"effectonce_consumer_position_age_seconds":         true,
	"effectonce_outbox_scheduled_messages":             true,
	"effectonce_outbox_metrics_errors_total":           true,
	"effectonce_outbox_relay_info":                     true,
}

// rule is an alert of alerts.yaml.
type rule struct {
	Alert       string
	Expr        string
	Labels      map[string]string
	Annotations map[string]string
}

func alerts(t *testing.T) (all []rule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "prometheus/alerts.yaml")), &file))
	for _, group := range file.Groups {
		all = append(all, group.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// expressions returns the queries of the dashboard's panels, and those that fill its variables.
func expressions(t *testing.T) (all []string) {
	t.Helper()
	var dashboard struct {
		Panels     []struct{ Targets []struct{ Expr string } }
		Templating struct{ List []struct{ Definition string } }
	}
	require.NoError(t, json.Unmarshal([]byte(read(t, "grafana/outbox-relay.json")), &dashboard))
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			all = append(all, target.Expr)
		}
	}
	for _, variable := range dashboard.Templating.List {
		all = append(all, variable.Definition)
	}
	require.Greater(t, len(all), 20)
	return all
}

var (
	named   = regexp.MustCompile(`\beffectonce_[a-z_]+`)
	derived = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// Alerts and dashboard ask only for metrics that the program has, and the dashboard shows all of
// them.
func TestMetricsExist(t *testing.T) {
	t.Parallel()
	shown := map[string]bool{}
	for _, expr := range expressions(t) {
		for _, name := range named.FindAllString(expr, -1) {
			name = derived.ReplaceAllString(name, "")
			assert.True(t, metricNames[name], "dashboard: %s in %s", name, expr)
			shown[name] = true
		}
	}
	assert.Equal(t, metricNames, shown)
	for _, r := range alerts(t) {
		found := named.FindAllString(r.Expr, -1)
		assert.NotEmpty(t, found, r.Alert)
		for _, name := range found {
			assert.True(t, metricNames[derived.ReplaceAllString(name, "")], "%s: %s", r.Alert, name)
		}
	}
}

// Each alert describes what happens and links to a heading for operators that describes what to
// check and what to do. Each such heading belongs to an alert, and each alert has a test in which
// it fires.
func TestAlertsAreDocumented(t *testing.T) {
	t.Parallel()
	sections := map[string]string{}
	for _, section := range regexp.MustCompile(`(?m)^##+ `).Split(read(t, "../docs/runbook.md"), -1) {
		title, body, _ := strings.Cut(section, "\n")
		if name, found := strings.CutPrefix(title, "Alert: "); found {
			sections[name] = body
		}
	}
	tests := read(t, "prometheus/alerts_test.yaml")
	for _, r := range alerts(t) {
		assert.Contains(t, []string{"critical", "warning"}, r.Labels["severity"], r.Alert)
		assert.NotEmpty(t, r.Annotations["summary"], r.Alert)
		assert.NotEmpty(t, r.Annotations["description"], r.Alert)
		assert.Equal(t, "https://github.com/effectonce/effectonce/blob/main/docs/runbook.md#alert-"+strings.ToLower(r.Alert),
			r.Annotations["runbook_url"], r.Alert)
		for _, part := range []string{"**Symptom.**", "**Look.**", "**Remedy.**"} {
			assert.Contains(t, sections[r.Alert], part, "docs/runbook.md, Alert: %s", r.Alert)
		}
		delete(sections, r.Alert)
		fires := regexp.MustCompile(`alertname: ` + r.Alert + `\n\s+exp_alerts:\n`)
		assert.Regexp(t, fires, tests, r.Alert)
	}
	assert.Empty(t, sections, "headings without an alert")
}

var (
	flag     = regexp.MustCompile(`(?:^|[\s"'\[,-])(--[a-z][a-z-]+)`)
	variable = regexp.MustCompile(`\bOUTBOX_([A-Z_]+)\b`)
	// foreign are flags of other programs in these files.
	foreign = regexp.MustCompile(`docker .*|go build .*|test: \[CMD, (?:pg_isready|/opt/kafka)[^\n]*|FROM .*|COPY .*|RUN --mount[^&]*|kubectl .* exec [^/]*`)
)

// Every flag and every variable in these files exists in the program.
func TestFlagsExist(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for _, command := range [][]string{{"run"}, {"migrate", "up"}, {"migrate", "roles"}, {"status"}} {
		help, err := exec.CommandContext(t.Context(), "go", append(append([]string{"run", "../cmd/outbox-relay"}, command...), "--help")...).CombinedOutput()
		require.NoError(t, err, "%s", help)
		for _, found := range flag.FindAllStringSubmatch(string(help), -1) {
			known[found[1]] = true
		}
	}
	require.True(t, known["--drain-max"] && known["--interval"], "the help is not understood")
	used := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasSuffix(path, ".go") || strings.HasSuffix(path, ".json") {
			return err
		}
		text := foreign.ReplaceAllString(read(t, path), "")
		for _, found := range flag.FindAllStringSubmatch(text, -1) {
			used++
			assert.True(t, known[found[1]], "%s: %s", path, found[1])
		}
		for _, found := range variable.FindAllStringSubmatch(text, -1) {
			name := "--" + strings.ToLower(strings.ReplaceAll(found[1], "_", "-"))
			assert.True(t, known[name] || found[1] == "RELAY_IMAGE", "%s: %s", path, found[0])
		}
		return nil
	}))
	require.Greater(t, used, 20)
}

// Property: every file of YAML and JSON can be read, the templates of the chart aside. The programs
// that they are for read them in the long tier (.ci/deploy).
func TestFilesCanBeRead(t *testing.T) {
	t.Parallel()
	files := 0
	for _, root := range []string{".", "../.github"} {
		require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			kind := filepath.Ext(path)
			if err != nil || entry.IsDir() || strings.Contains(path, "templates") || kind != ".yaml" && kind != ".json" {
				return err
			}
			files++
			documents := yaml.NewDecoder(strings.NewReader(read(t, path))) // JSON is YAML, too
			for {
				var document any
				err := documents.Decode(&document)
				if errors.Is(err, io.EOF) {
					return nil
				}
				if !assert.NoError(t, err, path) {
					return nil
				}
				if kind == ".json" {
					assert.True(t, json.Valid([]byte(read(t, path))), path)
				}
			}
		}))
	}
	require.Greater(t, files, 10)
}

// The unit restarts a relay indefinitely, whatever it failed with: also after a panic, whose exit
// status is that of wrong settings.
func TestUnitStartsTheRelayAgain(t *testing.T) {
	t.Parallel()
	settings := map[string][]string{}
	for _, found := range regexp.MustCompile(`(?m)^(\w+)=(.*)$`).FindAllStringSubmatch(read(t, "systemd/outbox-relay.service"), -1) {
		settings[found[1]] = append(settings[found[1]], found[2])
	}
	assert.Equal(t, []string{"on-failure"}, settings["Restart"])
	assert.Equal(t, []string{"0"}, settings["StartLimitIntervalSec"], "no number of starts is too many")
	for _, exception := range []string{"RestartPreventExitStatus", "SuccessExitStatus", "StartLimitAction"} {
		assert.Empty(t, settings[exception], exception)
	}
}

// Each image that is pulled can be pinned to a digest by a variable, whose default is a tag, the
// same wherever it is used; the documentation names each variable.
func TestImagesCanBePinned(t *testing.T) {
	t.Parallel()
	tags := map[string]string{}
	use := func(file, name, tag string) {
		assert.Regexp(t, `^[a-z/]+:v?[0-9.]+$`, tag, "%s: %s", file, name)
		if tags[name] != "" {
			assert.Equal(t, tags[name], tag, "%s: %s", file, name)
		}
		tags[name] = tag
	}
	for _, file := range []string{"Dockerfile", "Dockerfile.binary"} {
		text := read(t, file)
		for _, found := range regexp.MustCompile(`(?m)^ARG (\w+_IMAGE)=(.*)$`).FindAllStringSubmatch(text, -1) {
			use(file, found[1], found[2])
		}
		for _, found := range regexp.MustCompile(`(?m)^FROM (?:--platform=\S+ )?(\S+)`).FindAllStringSubmatch(text, -1) {
			name, isVariable := strings.CutPrefix(found[1], "$")
			assert.True(t, found[1] == "scratch" || isVariable && tags[name] != "", "%s: %s", file, found[0])
		}
	}
	compose := read(t, "compose.yaml")
	for _, found := range regexp.MustCompile(`(?m)^ +(?:image|GO_IMAGE): (.*)$`).FindAllStringSubmatch(compose, -1) {
		variable := regexp.MustCompile(`^\$\{(\w+_IMAGE):-(.+)\}$`).FindStringSubmatch(found[1])
		if assert.NotNil(t, variable, found[0]) && variable[1] != "OUTBOX_RELAY_IMAGE" { // ours, built here
			use("compose.yaml", variable[1], variable[2])
		}
	}
	assert.Len(t, tags, 5)
	_, section, found := strings.Cut(read(t, "../docs/how-to/deploy.md"), "\n## Images\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for name, tag := range tags {
		assert.Contains(t, section, "`"+name+"`", name)
		assert.Contains(t, section, "`"+tag+"`", name)
	}
}

// The two ways to build the image give the same image.
func TestBothImagesAreTheSame(t *testing.T) {
	t.Parallel()
	last := func(path string) string {
		_, stage, found := strings.Cut(read(t, path), "\nFROM scratch\n")
		require.True(t, found, path)
		return stage
	}
	fromBuild := strings.ReplaceAll(last("Dockerfile"), "COPY --from=build /out/", "COPY ")
	assert.Equal(t, fromBuild, last("Dockerfile.binary"))
	assert.Contains(t, fromBuild, "\nUSER 65532:65532\n")
}
