package servers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/network"
)

// ensemble is the brokers of one Kafka in containers, on a network of their own.
type ensemble struct {
	network *testcontainers.DockerNetwork
	brokers []*dockerContainer
	down    map[int]bool
	turn    int // the broker to kill next
}

func (e *ensemble) start(ctx context.Context) error {
	for i, b := range e.brokers {
		if !e.down[i] {
			continue
		}
		if err := b.start(ctx); err != nil {
			return err
		}
		delete(e.down, i)
	}
	return nil
}

func (e *ensemble) alive(ctx context.Context) error {
	for i, b := range e.brokers {
		if e.down[i] {
			continue
		}
		if err := b.alive(ctx); err != nil {
			return fmt.Errorf("broker %d: %w", i+1, err)
		}
	}
	return nil
}

// kill kills one broker, each time the next one.
func (e *ensemble) kill(ctx context.Context) error {
	i := e.turn
	e.turn = (e.turn + 1) % len(e.brokers)
	e.down[i] = true
	return e.brokers[i].kill(ctx)
}

func (e *ensemble) remove(ctx context.Context) error {
	var problems []error
	for _, b := range e.brokers {
		problems = append(problems, b.remove(ctx))
	}
	return errors.Join(append(problems, e.network.Remove(ctx))...)
}

// inContainers creates several brokers. Each is controller, too: one of them may die.
func (k *Kafka) inContainers(ctx context.Context, port int, opts KafkaOptions) (_ *Server, err error) {
	if _, err := dockerProvider(); err != nil {
		return nil, err
	}
	net, err := network.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("create a network for the brokers: %w", err)
	}
	e := &ensemble{network: net, down: map[int]bool{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.remove(context.WithoutCancel(ctx)))
		}
	}()
	k.Brokers = nil
	var voters []string
	for node := 1; node <= opts.Count; node++ {
		voters = append(voters, fmt.Sprintf("%d@%s:9093", node, hostOf(node)))
	}
	replicas, inSync := fmt.Sprint(min(3, opts.Count)), fmt.Sprint(min(2, opts.Count))
	for node := 1; node <= opts.Count; node++ {
		if node > 1 {
			if port, err = freePort(ctx); err != nil {
				return nil, err
			}
		}
		address := fmt.Sprintf("127.0.0.1:%d", port)
		k.Brokers = append(k.Brokers, address)
		all := brokerSettings(node, address, hostOf(node), strings.Join(voters, ","))
		all["listeners"] = "PLAINTEXT://:9092,CONTROLLER://:9093,BROKER://:9094"
		for _, name := range []string{"default", "offsets.topic", "transaction.state.log", "share.coordinator.state.topic"} {
			all[name+".replication.factor"] = replicas
		}
		for _, name := range []string{"min.insync.replicas", "transaction.state.log.min.isr", "share.coordinator.state.topic.min.isr"} {
			all[name] = inSync
		}
		maps.Copy(all, opts.Settings)
		request := kafkaRequest(all, "-Xmx320m")
		request.Networks = []string{net.Name}
		request.NetworkAliases = map[string][]string{net.Name: {hostOf(node)}}
		b, err := createContainer(ctx, port, request)
		if err != nil {
			return nil, err
		}
		e.down[len(e.brokers)] = true
		e.brokers = append(e.brokers, b)
	}
	k.backend = e
	return &k.Server, nil
}

func hostOf(node int) string { return fmt.Sprintf("kafka-%d", node) }
