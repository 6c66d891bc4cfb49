package deploy_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

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
