//go:build unix

package command_test

import (
	"bufio"
	"os"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/internal/kafkatest"
)

// Property: the servers for trying out answer at the addresses that are printed, have the topic,
// and end with the command.
func TestServersForTryingOut(t *testing.T) {
	t.Parallel()
	cmd, _ := process(t, nil, "servers", "--topic", "orders")
	cmd.Env = append(os.Environ(), cmd.Env...)
	cmd.WaitDelay = 30 * time.Second
	cmd.Stdout, cmd.Stderr = nil, nil
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	found := regexp.MustCompile(`^export DATABASE_URL='(.+)' KAFKA_BROKERS='(.+)'\n$`).FindStringSubmatch(line)
	require.Len(t, found, 3, line)
	conn, err := pgx.Connect(t.Context(), found[1])
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	topics, err := kadm.NewClient(kafkatest.ClientAt(t, []string{found[2]})).ListTopics(t.Context())
	require.NoError(t, err)
	assert.True(t, topics.Has("orders"))

	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "a stop on demand is no failure")
	_, err = pgx.Connect(t.Context(), found[1])
	require.Error(t, err)
}
