package deploy_test

import (
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// metricNames are the documented metrics of "outbox-relay run", without the one that says nothing
// about trouble.
func metricNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(effectonce_\\w+)` \\|").FindAllStringSubmatch(read(t, "../docs/reference/metrics.md"), -1) {
		names[row[1]] = true
	}
	require.Greater(t, len(names), 20)
	return names
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
	names, shown := metricNames(t), map[string]bool{}
	for _, expr := range expressions(t) {
		for _, name := range named.FindAllString(expr, -1) {
			shown[derived.ReplaceAllString(name, "")] = true
		}
	}
	assert.Equal(t, names, shown)
	reference, err := os.ReadFile("../docs/reference/metrics.md")
	require.NoError(t, err)
	_, documented, _ := strings.Cut(string(reference), "## Requests, in your own programs")
	for _, r := range alerts(t) {
		found := named.FindAllString(r.Expr, -1)
		assert.NotEmpty(t, found, r.Alert)
		for _, name := range found {
			mine := strings.Contains(documented, "`"+name+"{") // a metric of programs that use the library
			assert.True(t, mine || names[derived.ReplaceAllString(name, "")], "%s: %s", r.Alert, name)
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
	known := map[string]bool{} // as docs/cli.md has them, which is written from the commands
	for _, found := range regexp.MustCompile("`(--[a-z-]+)").FindAllStringSubmatch(read(t, "../docs/cli.md"), -1) {
		known[found[1]] = true
	}
	require.True(t, known["--drain-max"] && known["--interval"], "docs/cli.md is not understood")
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

// command runs a program to its end and returns what it wrote to stdout.
func command(t *testing.T, environment []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = append(os.Environ(), environment...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	require.NoError(t, err, "%s %v: %s%s", name, args, out, said.String())
	return strings.TrimSpace(string(out))
}

// image builds the image from a static binary and returns its ID.
func image(t *testing.T) string {
	t.Helper()
	if err := exec.CommandContext(t.Context(), "docker", "info").Run(); err != nil {
		require.NotEqual(t, "1", os.Getenv("REQUIRE_CONTAINERS"), "no Docker engine answers") //nolint:forbidigo // the same variable as the servers of tests
		t.Skip("LOUD SKIP: the image is not tested, no Docker engine answers")
	}
	if runtime.GOOS != "linux" {
		t.Skip("LOUD SKIP: the image is not tested, its containers take the network of the host, which is Linux only")
	}
	dir := t.TempDir()
	command(t, []string{"CGO_ENABLED=0"}, "go", "build", "-tags=lean", "-trimpath", "-ldflags=-s -w -buildid=", "-o", filepath.Join(dir, "outbox-relay"), "../cmd/outbox-relay")
	// The check needs no certificates; an image for users has those of the system that builds it.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca-certificates.crt"), nil, 0o600))
	idFile := filepath.Join(dir, "id")
	command(t, []string{"DOCKER_BUILDKIT=0"}, "docker", "build", "-q", "-f", "Dockerfile.binary", "--iidfile", idFile, "--build-arg", "VERSION="+filepath.Base(dir), dir)
	id := strings.TrimSpace(read(t, idFile))
	t.Cleanup(func() { _ = exec.CommandContext(context.WithoutCancel(t.Context()), "docker", "image", "rm", id).Run() })
	return id
}

// confined are the rights that the manifests leave to a container.
func confined(image string, args ...string) []string {
	return append([]string{
		"--network=host", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=256", "--memory=512m",
		"--env=OUTBOX_DATABASE_URL", "--env=OUTBOX_BROKERS", image,
	}, args...)
}

// The image migrates the tables and publishes, as a user that is not root, on a read-only file
// system and without capabilities; SIGTERM ends it cleanly.
func TestImagePublishes(t *testing.T) {
	longtest.Only(t, "it builds an image")
	t.Parallel()
	built := image(t)
	address, topic := pgtest.EmptyDatabase(t), kafkatest.Topic(t, 1)
	environment := []string{"OUTBOX_DATABASE_URL=" + address, "OUTBOX_BROKERS=" + strings.Join(kafkatest.Brokers(t), ",")}
	once := func(args ...string) string {
		return command(t, environment, "docker", append([]string{"run", "--rm"}, confined(built, args...)...)...)
	}
	assert.Contains(t, once("version"), "outbox-relay ")
	assert.Contains(t, once("--help"), "Usage:")
	assert.Contains(t, once("migrate", "up"), "was 0")

	id := command(t, environment, "docker", append([]string{"run", "--detach"}, confined(built, "run")...)...)
	t.Cleanup(func() {
		_ = exec.CommandContext(context.WithoutCancel(t.Context()), "docker", "rm", "--force", id).Run()
	})
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	_, err = conn.Exec(t.Context(), "INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'order-1', 'paid')", topic)
	require.NoError(t, err)
	testwait.True(t, "it publishes", func() bool { return kafkatest.Count(t, topic) >= 1 })
	testwait.True(t, "it is ready", func() bool { // the health check of compose.yaml
		return exec.CommandContext(t.Context(), "docker", "exec", id, "/outbox-relay", "ready").Run() == nil
	})
	assert.Regexp(t, `65532\s+\d+\s+/outbox-relay run`, command(t, nil, "docker", "top", id, "-eo", "uid,pid,args"))
	command(t, nil, "docker", "stop", id)
	assert.Equal(t, "0", command(t, nil, "docker", "inspect", "--format={{.State.ExitCode}}", id))
}
