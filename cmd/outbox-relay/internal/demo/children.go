package demo

import (
	"context"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
)

// children are the processes of a run.
type children struct {
	*fleet.Fleet

	jobs map[string]*job // by the process's name
}

func newChildren(ctx context.Context, command []string, logs string, jobs []job) *children {
	c := &children{jobs: map[string]*job{}}
	var specs []fleet.Spec
	for _, j := range jobs {
		c.jobs[j.Name] = &j
		specs = append(specs, fleet.Spec{
			Name: j.Name, Command: command, Input: func() any { return j }, Finishes: j.Role == roleShop,
		})
	}
	c.Fleet = fleet.New(ctx, logs, specs)
	return c
}

// start starts the processes of a role, with jobs that begin now.
func (c *children) start(r role) error {
	for _, p := range c.of(r) {
		c.jobs[p.Name].Start = time.Now()
		if err := p.Start(); err != nil {
			return err
		}
	}
	return nil
}

// of returns the processes of a role.
func (c *children) of(r role) []*fleet.Process {
	return c.All(func(p *fleet.Process) bool { return c.jobs[p.Name].Role == r })
}

// stop asks the processes of a role to end, and kills those that do not end within the limit.
func (c *children) stop(ctx context.Context, r role, limit time.Duration) error {
	return fleet.Stop(ctx, c.of(r), limit)
}
