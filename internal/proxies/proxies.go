package proxies

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Proxy is a Toxiproxy between a process and a server.
type Proxy struct {
	*toxiproxy.Proxy

	set    *Set
	mended bool // toxics were removed from it
}

// Set is the ways of one process to its servers.
type Set struct {
	Postgres, Kafka []*Proxy
	// DatabaseURL leads to the database through its proxy.
	DatabaseURL string
	// Through leads from the address that a broker advertises to its proxy; see Dialer.
	Through map[string]string

	server *toxiproxy.ApiServer
	always string // a toxic that stays
}

// Distance is a latency of 20 ms, give or take 10 ms, from server to process: it makes the time
// between two durable steps long enough for faults to hit it.
const Distance = `{"name": "distance", "type": "latency", "stream": "downstream", "attributes": {"latency": 20, "jitter": 10}}`

// New starts the proxies to a database and to brokers, by the addresses that these advertise. always
// is a toxic that stays, such as Distance; empty: none. The caller has to call Close.
func New(database string, brokers []string, always string) (_ *Set, err error) {
	zerolog.SetGlobalLevel(zerolog.Disabled) // toxics write to standard error
	s := &Set{
		Through: map[string]string{}, always: always,
		server: toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop()),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	u, err := url.Parse(database)
	if err != nil {
		return nil, errors.New("the database's address is no URL") // the error would show the password
	}
	postgres, err := s.between(u.Host)
	if err != nil {
		return nil, err
	}
	s.Postgres = append(s.Postgres, postgres)
	u.Host = postgres.Listen
	s.DatabaseURL = u.String()
	for _, address := range brokers {
		p, err := s.between(address)
		if err != nil {
			return nil, err
		}
		s.Kafka = append(s.Kafka, p)
		s.Through[address] = p.Listen
	}
	return s, nil
}

// Close ends all connections.
func (s *Set) Close() error { return Refuse(append(s.Kafka, s.Postgres...)) }

// Seeds are the brokers as the cluster calls them, so that no way leads past the proxies.
func (s *Set) Seeds() []string {
	var seeds []string
	for _, p := range s.Kafka {
		seeds = append(seeds, p.Upstream)
	}
	return seeds
}

// Dialer goes through proxies; an address without one is refused.
func Dialer(through map[string]string) kgo.Opt {
	return kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		listen, ok := through[address]
		if !ok {
			return nil, fmt.Errorf("no proxy for the broker at %s", address)
		}
		var d net.Dialer
		return d.DialContext(ctx, network, listen)
	})
}

func (s *Set) between(address string) (*Proxy, error) {
	inner, err := s.listen("127.0.0.1:0", address)
	if err != nil {
		return nil, err
	}
	return &Proxy{Proxy: inner, set: s}, nil
}

func (s *Set) listen(address, upstream string) (*toxiproxy.Proxy, error) {
	p := toxiproxy.NewProxy(s.server, upstream, address, upstream)
	if s.always != "" {
		if _, err := p.Toxics.AddToxicJson(strings.NewReader(s.always)); err != nil {
			return nil, err
		}
	}
	return p, p.Start()
}

// renew replaces a proxy from which toxics were removed, at the same address. Toxiproxy leaves a
// removed toxic in a connection that was closing just then, and the next toxics that are added to
// that connection end the program.
func (p *Proxy) renew() (err error) {
	if !p.mended {
		return nil
	}
	p.Stop()
	p.Proxy, err = p.set.listen(p.Listen, p.Upstream)
	p.mended = false
	return err
}

// ErrStuck means that Toxiproxy did not finish a change.
var ErrStuck = errors.New("toxiproxy is stuck")

// inTime gives up on Toxiproxy, which can wait forever for a connection that ends while its toxics
// change.
func inTime(change func() error) error {
	done := make(chan error, 1)
	go func() { done <- change() }()
	select {
	case err := <-done:
		return err
	case <-time.After(5 * time.Second):
		return ErrStuck
	}
}

// Toxic changes what goes one way (upstream, downstream) through each of the proxies, also on
// connections that are open. kind and attributes are Toxiproxy's.
func Toxic(list []*Proxy, kind, way, attributes string) error {
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

// Refuse closes all connections and takes no new ones.
func Refuse(list []*Proxy) error {
	return inTime(func() error {
		for _, p := range list {
			p.Stop()
		}
		return nil
	})
}

// LetThrough lets everything through again. Connections whose bytes were dropped are closed.
func LetThrough(ctx context.Context, list []*Proxy) error {
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
