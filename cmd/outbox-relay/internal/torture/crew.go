package torture

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/proxies"
	"github.com/effectonce/effectonce/internal/servers"
)

// crew is the processes of a round.
type crew struct {
	*fleet.Fleet

	mu       sync.Mutex
	jobs     map[string]*worker.Job // by the process's name
	until    time.Time              // the end of the faults; zero before they begin
	services []string               // URLs
	ways     map[string]*proxies.Set
	pooler   *servers.Pooler // nil: none
}

// logins are the database logins of the roles.
var logins = map[string]string{ //nolint:gochecknoglobals // a constant
	worker.RoleProducer: "publisher", worker.RoleRelay: "relay", worker.RoleConsumer: "consumer", worker.RoleService: "endpoint",
}

// hire describes all processes of a round; none runs yet.
func hire(ctx context.Context, t *run, logs string, s *site, p Plan, bank string) (_ *crew, err error) {
	c := &crew{jobs: map[string]*worker.Job{}, ways: map[string]*proxies.Set{}}
	if err := c.startPooler(ctx, s, p.Scene); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.stopPooler(ctx))
		}
	}()
	var specs []fleet.Spec
	add := func(role string, n int, change func(j *worker.Job) error) error {
		for i := range n {
			j := &worker.Job{
				Role: role, Name: fmt.Sprintf("%s-%d", role, i+1), Place: int64(len(specs) + 1), Seed: p.Seed,
				Brokers: s.brokers, Topic: s.name, Scene: p.Scene, Ledgers: logs, Bank: bank,
			}
			if j.DatabaseURL, err = s.as(logins[role]); err != nil {
				return err
			}
			if err := change(j); err != nil {
				return err
			}
			if err := c.pooled(j); err != nil {
				return err
			}
			other := role == worker.RoleRelay && t.Other != "" // its command line knows no proxies
			if p.Scene.Proxies && role != worker.RoleProducer && !other {
				if err := c.through(j, role, s); err != nil {
					return err
				}
			}
			c.jobs[j.Name] = j
			spec := fleet.Spec{Name: j.Name, Command: t.command(p.Scene), Input: func() any { return c.next(j) }, Expected: worker.ExitStatus}
			if role == worker.RoleRelay && i%2 == 1 && t.Other != "" {
				c.otherRelease(&spec, j, t.Other)
			}
			specs = append(specs, spec)
		}
		return nil
	}
	asIs := func(*worker.Job) error { return nil }
	if err := add(worker.RoleProducer, p.Scene.Producers.Processes, asIs); err != nil {
		return nil, err
	}
	replicas := p.Scene.Relay.Replicas
	if t.Other != "" {
		replicas = max(2, replicas) // one of each release
	}
	if err := add(worker.RoleRelay, replicas, asIs); err != nil {
		return nil, err
	}
	for _, g := range p.Scene.Groups {
		if err := add(worker.RoleConsumer, g.Members, func(j *worker.Job) error {
			j.Group, j.Name = g, fmt.Sprintf("%s-%d-%s", j.Role, g.Number, j.Name[len(j.Role)+1:])
			return nil
		}); err != nil {
			return nil, err
		}
	}
	if p.Scene.Service {
		if err := add(worker.RoleService, 2, func(j *worker.Job) (err error) {
			j.Listen, err = freeAddress(ctx)
			c.services = append(c.services, "http://"+j.Listen)
			return err
		}); err != nil {
			return nil, err
		}
	}
	c.Fleet = fleet.New(ctx, logs, specs)
	return c, nil
}

// otherRelease makes a relay one of another release, which is run as its operators run it.
func (c *crew) otherRelease(spec *fleet.Spec, j *worker.Job, program string) {
	r := j.Scene.Relay
	spec.Command = []string{
		program, "run", "--listen=off", "--insecure", "--lease=2s", "--drain-max=5s", "--database-wait=5m", "--shards=" + strconv.Itoa(int(r.Shards)),
		"--keep=" + r.Keep.String(), "--progress-topic=" + j.Topic + "-progress", "--exactly-once=" + strconv.FormatBool(r.ExactlyOnce),
		"--wake-on-notify=" + strconv.FormatBool(r.Notify),
	}
	spec.Env = []string{"OUTBOX_DATABASE_URL=" + j.DatabaseURL + "&application_name=" + j.Name, "OUTBOX_BROKERS=" + strings.Join(j.Brokers, ",")}
}

// through gives the processes of a role their own ways to the servers.
func (c *crew) through(j *worker.Job, role string, s *site) (err error) {
	set, ok := c.ways[role]
	if !ok {
		if set, err = proxies.New(j.DatabaseURL, s.brokers, ""); err != nil {
			return err
		}
		c.ways[role] = set
	}
	j.DatabaseURL, j.Through = set.DatabaseURL, set.Through
	return nil
}

// next is the job of the next process of a place.
func (c *crew) next(j *worker.Job) worker.Job {
	c.mu.Lock()
	defer c.mu.Unlock()
	j.Incarnation++
	j.Until = c.until
	return *j
}

// vary gives the next process of a place other settings, within what replicas may differ in.
func (c *crew) vary(p *fleet.Process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.jobs[p.Name].Variant = (c.jobs[p.Name].Variant + 1) % 4
}

// begin lets the processes that start from now on strike themselves, until the faults end.
func (c *crew) begin(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until = until
}

func (c *crew) of(role string) []*fleet.Process {
	return c.All(func(p *fleet.Process) bool { return c.jobs[p.Name].Role == role })
}

func (c *crew) start(roles ...string) error {
	for _, role := range roles {
		for _, p := range c.of(role) {
			if err := p.Start(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *crew) close(ctx context.Context) {
	c.Close()
	for _, set := range c.ways {
		_ = set.Close() // nothing uses it any more
	}
	_ = c.stopPooler(ctx) // the end of this process ends it, too
}

// stopPooler also stops none, and one that is stopped.
func (c *crew) stopPooler(ctx context.Context) error {
	if c.pooler == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopMax)
	defer cancel()
	return c.pooler.Stop(ctx)
}

func freeAddress(ctx context.Context) (string, error) {
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String(), nil
}
