//go:build unix

package command_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
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

// The command shows the promise, and where it does not hold the checker sees it: without the claim,
// duplicates have effects.
func TestDemo(t *testing.T) {
	longtest.Only(t, "the demo, twice")
	t.Parallel()
	for name, broken := range map[string]bool{"holds": false, "breaks without dedup": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, _ := process(t, map[string]string{"DATABASE_URL": "", "KAFKA_BROKERS": ""}, "demo", "--orders", "800", "--duration", "6s", "--json", "--seed", "11", fmt.Sprint("--without-dedup=", broken))
			cmd.Env = append(os.Environ(), cmd.Env...)
			stdout, stderr := newOutput(), newOutput()
			cmd.Stdout, cmd.Stderr = stdout, stderr
			err := cmd.Run()
			require.Equal(t, broken, err != nil, "%v: %s\n%s", err, stderr, stdout)
			lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
			var result map[string]any
			require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result), stdout)
			for _, name := range []string{"lost", "undelivered", "crashes"} {
				assert.Zero(t, result[name], name)
			}
			for _, name := range []string{"doubled", "wrong_balances"} {
				assert.Equal(t, broken, result[name] != 0.0, name)
			}
			for _, name := range []string{"duplicates_delivered", "kills", "freezes", "seconds"} {
				assert.Greater(t, result[name], 0.0, name)
			}
		})
	}
}
