package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
)

// distance is a proxy to PostgreSQL that delays bytes, by half a round trip each way. It keeps
// their order and does not reduce the bandwidth.
type distance struct {
	listener        net.Listener
	network, target string
	oneWay          time.Duration
	life            context.Context //nolint:containedctx // of the connections
	end             context.CancelFunc

	mu     sync.Mutex
	open   map[net.Conn]struct{}
	closed bool
	group  sync.WaitGroup
}

// newDistance returns the proxy, and the address of the database through it.
func newDistance(ctx context.Context, databaseURL string, roundTrip time.Duration) (*distance, string, error) {
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return nil, "", fmt.Errorf("database URL: %w", err)
	}
	d := &distance{oneWay: roundTrip / 2, open: map[net.Conn]struct{}{}}
	d.life, d.end = context.WithCancel(context.WithoutCancel(ctx))
	d.network, d.target = network(config.Host, config.Port)
	var listen net.ListenConfig
	if d.listener, err = listen.Listen(ctx, "tcp", "127.0.0.1:0"); err != nil {
		d.end()
		return nil, "", fmt.Errorf("listen in front of PostgreSQL: %w", err)
	}
	d.group.Go(func() { d.accept(ctx) })
	return d, through(databaseURL, d.listener.Addr().(*net.TCPAddr).Port), nil
}

// network returns where libpq's host and port are.
func network(host string, port uint16) (kind, address string) {
	if strings.HasPrefix(host, "/") {
		return "unix", fmt.Sprintf("%s/.s.PGSQL.%d", host, port)
	}
	return "tcp", net.JoinHostPort(host, fmt.Sprint(port))
}

// through changes an address to a port of this machine.
func through(databaseURL string, port int) string {
	u, err := url.Parse(databaseURL)
	if err != nil || !strings.HasPrefix(u.Scheme, "postgres") {
		return fmt.Sprintf("%s host=127.0.0.1 port=%d", databaseURL, port) // the last one counts
	}
	query := u.Query()
	query.Del("host")
	query.Del("port")
	u.RawQuery, u.Host = query.Encode(), fmt.Sprintf("127.0.0.1:%d", port)
	return u.String()
}

func (d *distance) accept(ctx context.Context) {
	for {
		near, err := d.listener.Accept()
		if err != nil {
			return
		}
		var dial net.Dialer
		far, err := dial.DialContext(ctx, d.network, d.target)
		if err != nil {
			_ = near.Close() // which the client reports
			continue
		}
		if !d.keep(near, far) {
			return
		}
		d.group.Go(func() { d.carry(near, far) })
		d.group.Go(func() { d.carry(far, near) })
	}
}

// keep records connections, to close them; after the end it closes them at once.
func (d *distance) keep(conns ...net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range conns {
		if d.closed {
			_ = c.Close()
		} else {
			d.open[c] = struct{}{}
		}
	}
	return !d.closed
}

// chunk is data from one read, and its arrival time.
type chunk struct {
	bytes []byte
	due   time.Time
}

// underWay is how many chunks may be in transit in each direction.
const underWay = 4096

// carry forwards one direction until either end closes.
func (d *distance) carry(from, to net.Conn) {
	chunks := make(chan chunk, underWay)
	d.group.Go(func() {
		for c := range chunks {
			if !pause.For(d.life, time.Until(c.due)) {
				break
			}
			if _, err := to.Write(c.bytes); err != nil {
				break
			}
		}
		_ = from.Close()
		for range chunks { // what can no longer be delivered
		}
		_ = to.Close()
	})
	defer close(chunks)
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			chunks <- chunk{append([]byte(nil), buffer[:n]...), time.Now().Add(d.oneWay)}
		}
		if err != nil {
			return
		}
	}
}

func (d *distance) close() {
	_ = d.listener.Close()
	d.end()
	d.mu.Lock()
	d.closed = true
	for c := range d.open {
		_ = c.Close()
	}
	d.mu.Unlock()
	d.group.Wait()
}

// measureRoundTrip returns the duration of a statement on a connection, in milliseconds: the median
// of several.
func measureRoundTrip(ctx context.Context, databaseURL string) (_ float64, err error) {
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		return 0, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() {
		if closed := conn.Close(ctx); err == nil && closed != nil && !errors.Is(closed, io.EOF) {
			err = closed
		}
	}()
	took := make([]float64, machineSamples)
	for i := range took {
		begun := time.Now()
		if _, err := conn.Exec(ctx, roundTripSQL); err != nil {
			return 0, fmt.Errorf("measure a round trip: %w", err)
		}
		took[i] = time.Since(begun).Seconds() * 1000
	}
	return percentile(took, 0.5), nil
}
