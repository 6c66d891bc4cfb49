package serving_test

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// deadlines counts the read deadlines that are set on the connections of a listener.
type deadlines struct {
	net.Listener

	set   atomic.Int64
	marks []int64 // what set was
}

func (d *deadlines) mark() { d.marks = append(d.marks, d.set.Load()) }

func (d *deadlines) Accept() (net.Conn, error) {
	conn, err := d.Listener.Accept()
	return &counted{conn, d}, err
}

type counted struct {
	net.Conn

	of *deadlines
}

func (c *counted) SetReadDeadline(at time.Time) error {
	if !at.IsZero() { // net/http takes its own back, behind a whole body
		c.of.set.Add(1)
	}
	return c.Conn.SetReadDeadline(at)
}

// serve starts a server with a ReadTimeout whose answers are what ReadBody said.
func serve(t *testing.T, http2 bool, server, limit time.Duration, before, behind func(d *deadlines)) (*httptest.Server, *deadlines) {
	t.Helper()
	d := &deadlines{}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		before(d)
		if _, err := serving.ReadBody(w, r, 100, limit); err != nil {
			http.Error(w, err.Error(), http.StatusRequestTimeout)
		}
		behind(d)
	}))
	d.Listener, s.Listener = s.Listener, d
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Config.ReadTimeout = server
	s.EnableHTTP2 = http2
	if http2 {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s, d
}

func unseen(*deadlines) {}

// Property: of the server's limit and this one the shorter ends a body that does not come, over
// HTTP/1 and HTTP/2. Rows H10, H30 of guarantees.md.
func TestTheShorterLimitEndsASlowBody(t *testing.T) {
	t.Parallel()
	for name, http2 := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		for limit, of := range map[string][2]time.Duration{
			"server's": {300 * time.Millisecond, time.Hour},
			"ours":     {time.Hour, 100 * time.Millisecond},
			"only one": {0, 100 * time.Millisecond},
		} {
			t.Run(name+"/"+limit, func(t *testing.T) {
				t.Parallel()
				s, _ := serve(t, http2, of[0], of[1], unseen, unseen)
				slow, end := io.Pipe()
				defer func() { _ = end.Close() }()
				go func() { _, _ = end.Write([]byte("a")) }()
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, slow)
				require.NoError(t, err)
				client := s.Client()
				client.Timeout = time.Minute
				response, err := client.Do(r)
				require.NoError(t, err)
				text, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Equal(t, http.StatusRequestTimeout, response.StatusCode)
				require.Contains(t, string(text), serving.ErrSlow.Error())
			})
		}
	}
}

// Property: for a body that comes in time no deadline is set in place of the server's. Row H30 of
// guarantees.md.
func TestReadLimitLeavesTheServersDeadline(t *testing.T) {
	t.Parallel()
	s, d := serve(t, false, time.Minute, time.Hour, (*deadlines).mark, (*deadlines).mark)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, strings.NewReader("a"))
	require.NoError(t, err)
	response, err := s.Client().Do(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.Len(t, d.marks, 2)
	require.NotZero(t, d.marks[0], "the server sets one")
	require.Equal(t, d.marks[0], d.marks[1])
}

func TestMain(m *testing.M) { pgtest.Main(m) }
