package cli_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// Row S3 of guarantees.md: a setting that holds the URL does not show it, however it is formatted.
func TestSecretsDoNotFormat(t *testing.T) {
	t.Parallel()
	text := cli.FormatSettings("postgres://user:CANARY@host/db")
	assert.NotContains(t, text, "CANARY")
	assert.Contains(t, text, "host:5432/db")
}

// Property: invalid flags and the problems of each check are reported together. A problem that only
// follows from an invalid flag is not.
func TestChecksAreReportedWithInvalidFlags(t *testing.T) {
	t.Parallel()
	environment := map[string]string{"OUTBOX_NUMBER": "ten", "OUTBOX_PAUSE": "2s"}
	s := cli.NewSettings(func(name string) (string, bool) { value, found := environment[name]; return value, found })
	var number int
	var pause time.Duration
	cmd := cli.Offline(&cobra.Command{Use: "x"})
	s.AddFlags(cmd.Flags())
	cli.AddInt(cmd.Flags(), &number, "number", 1, 1, 9, "a number")
	cli.AddDuration(cmd.Flags(), &pause, "pause", time.Second, time.Second, time.Minute, "a pause")
	s.Check(cmd, func() error { return errors.Join(errors.New("--number is missing"), errors.New("--topic is missing")) })
	s.Check(cmd, func() error { return errors.New("--group is missing") })
	require.EqualError(t, s.Resolve(cmd), "OUTBOX_NUMBER \"ten\": want a number, 1 to 9\n--topic is missing\n--group is missing")
	assert.False(t, s.Resolved())
	assert.Equal(t, 2*time.Second, pause)
}

// Property: a start waits for a database, or a pooler before it, that is unavailable, and not for one that
// refuses the connection.
func TestDatabaseThatIsWaitedFor(t *testing.T) {
	t.Parallel()
	for text, away := range map[string]bool{
		"08P01 server login has been failing, cached error: connect failed (server_login_retry)": true, "58000 server closed the connection unexpectedly": true,
		"53100 no space left": true, "57P03 the database system is starting up": true, "55P03 lock not available": true,
		"08P01 no such database: d": false, "28P01 password authentication failed": false, "3D000 database \"d\" does not exist": false,
	} {
		code, message, _ := strings.Cut(text, " ")
		assert.Equal(t, away, cli.Away(fmt.Errorf("connect: %w", &pgconn.PgError{Code: code, Message: message})), text)
	}
}

// Row S6 of guarantees.md: the address that a name resolves to when it is dialed decides: a name of
// this machine that resolves to another one is refused; another name that resolves to this machine
// is not.
func TestBrokersAreLookedAtWhenResolved(t *testing.T) {
	t.Parallel()
	for leads, refused := range map[[4]byte]bool{{127, 0, 0, 1}: false, {192, 0, 2, 1}: true} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = listener.Close() })
		_, port, err := net.SplitHostPort(listener.Addr().String())
		require.NoError(t, err)
		broker := "broker.test:" + port
		conn, err := cli.DialThisMachine(t.Context(), &net.Dialer{Timeout: time.Minute, Resolver: resolver(leads)}, broker)
		if refused {
			require.ErrorContains(t, err, "broker "+broker+", at 192.0.2.1:"+port+", is on another machine")
			continue
		}
		require.NoError(t, err)
		require.NoError(t, conn.Close())
	}
}

// resolver finds one address for each name.
func resolver(address [4]byte) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		asked, server := net.Pipe() // not a packet's connection: messages have their length in front
		go func() {
			defer func() { _ = server.Close() }()
			question := make([]byte, 512)
			n, err := server.Read(question[:2])
			if err == nil {
				n, err = io.ReadFull(server, question[:binary.BigEndian.Uint16(question[:n])])
			}
			if err != nil {
				return
			}
			const header, response, typeA = 12, 0x8180, 1
			end := header + bytes.IndexByte(question[header:n], 0) + 5 // of name, type and class
			answer := slices.Concat(question[:2], binary.BigEndian.AppendUint16(nil, response), []byte{0, 1, 0, 0, 0, 0, 0, 0}, question[header:end])
			if question[end-3] == typeA {
				answer[7] = 1
				answer = append(answer, 0xc0, header, 0, typeA, 0, 1, 0, 0, 0, 60, 0, 4)
				answer = append(answer, address[:]...)
			}
			_, _ = server.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
		}()
		return asked, nil
	}}
}
