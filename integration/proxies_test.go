package integration_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/effectonce/effectonce/internal/kafkatest"
)

// distance makes the time between two durable steps long enough for faults to hit it.
const distance = `{"name": "distance", "type": "latency", "stream": "downstream", "attributes": {"latency": 20, "jitter": 10}}`

// proxy is a Toxiproxy between a process and a server.
type proxy struct {
	*toxiproxy.Proxy

	server *toxiproxy.ApiServer
	mended bool // toxics were removed from it
}

// newProxy listens at an address.
func newProxy(server *toxiproxy.ApiServer, listen, upstream string) (*toxiproxy.Proxy, error) {
	p := toxiproxy.NewProxy(server, upstream, listen, upstream)
	if _, err := p.Toxics.AddToxicJson(strings.NewReader(distance)); err != nil {
		return nil, err
	}
	return p, p.Start()
}

// renew replaces a proxy from which toxics were removed, at the same address. Toxiproxy leaves a
// removed toxic in a connection that was closing just then, and the next toxics that are added to
// that connection end the program.
func (p *proxy) renew() (err error) {
	if !p.mended {
		return nil
	}
	p.Stop()
	p.Proxy, err = newProxy(p.server, p.Listen, p.Upstream)
	p.mended = false
	return err
}

// proxies are the ways of one process to its servers.
type proxies struct {
	postgres, kafka []*proxy
	url             string            // of the database, through its proxy
	through         map[string]string // from the address that a broker advertises to its proxy
}

func newProxies(t *testing.T, database string) *proxies {
	t.Helper()
	zerolog.SetGlobalLevel(zerolog.Disabled) // toxics write to standard error
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	between := func(address string) *proxy {
		inner, err := newProxy(server, "127.0.0.1:0", address)
		require.NoError(t, err)
		p := &proxy{Proxy: inner, server: server}
		t.Cleanup(func() { _ = inTime(func() error { p.Stop(); return nil }) })
		return p
	}
	u, err := url.Parse(database)
	require.NoError(t, err)
	p := &proxies{postgres: []*proxy{between(u.Host)}, through: map[string]string{}}
	u.Host = p.postgres[0].Listen
	p.url = u.String()
	brokers, err := kadm.NewClient(kafkatest.Client(t)).ListBrokers(t.Context())
	require.NoError(t, err)
	for _, b := range brokers {
		address := net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
		broker := between(address)
		p.kafka = append(p.kafka, broker)
		p.through[address] = broker.Listen
	}
	return p
}

// seeds are the brokers as the cluster calls them, so that no way leads past the proxies.
func (p *proxies) seeds() []string {
	var seeds []string
	for _, between := range p.kafka {
		seeds = append(seeds, between.Upstream)
	}
	return seeds
}

// dialer goes through proxies; an address without one is refused.
func dialer(through map[string]string) kgo.Opt {
	return kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		listen, ok := through[address]
		if !ok {
			return nil, fmt.Errorf("no proxy for the broker at %s", address)
		}
		var d net.Dialer
		return d.DialContext(ctx, network, listen)
	})
}

var errStuck = errors.New("toxiproxy is stuck")

// inTime gives up on Toxiproxy, which can wait forever for a connection that ends while its toxics
// change.
func inTime(change func() error) error {
	done := make(chan error, 1)
	go func() { done <- change() }()
	select {
	case err := <-done:
		return err
	case <-time.After(5 * time.Second):
		return errStuck
	}
}

// toxic changes what goes one way through each of the proxies, also on connections that are open.
func toxic(list []*proxy, kind, way, attributes string) error {
	return inTime(func() error {
		for _, p := range list {
			if err := p.renew(); err != nil {
				return err
			}
			text := fmt.Sprintf(`{"type": %q, "stream": %q, "attributes": %s}`, kind, way, attributes)
			if _, err := p.Toxics.AddToxicJson(strings.NewReader(text)); err != nil {
				return err
			}
		}
		return nil
	})
}

// refuse closes all connections and takes no new ones.
func refuse(list []*proxy) error {
	return inTime(func() error {
		for _, p := range list {
			p.Stop()
		}
		return nil
	})
}

// letThrough lets everything through again. Connections whose bytes were dropped are closed.
func letThrough(ctx context.Context, list []*proxy) error {
	return inTime(func() error {
		for _, p := range list {
			for _, present := range p.Toxics.GetToxicArray() {
				if name := present.(*toxics.ToxicWrapper).Name; name != "distance" {
					p.mended = true
					if err := p.Toxics.RemoveToxic(ctx, name); err != nil {
						return err
					}
				}
			}
			if err := p.Start(); err != nil && !errors.Is(err, toxiproxy.ErrProxyAlreadyStarted) {
				return err
			}
		}
		return nil
	})
}

// leftByProxies are goroutines for bytes to peers that were killed: Toxiproxy never ends them.
func leftByProxies() []goleak.Option {
	const module = "github.com/Shopify/toxiproxy/v2"
	return []goleak.Option{
		goleak.IgnoreAnyFunction(module + ".(*ToxicLink).read"),
		goleak.IgnoreAnyFunction(module + ".(*ToxicLink).write"),
		goleak.IgnoreAnyFunction(module + "/toxics.(*ToxicStub).Run"),
		goleak.IgnoreAnyFunction(module + "/toxics.(*ToxicStub).InterruptToxic"),
	}
}
