package servers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	kafkaImage = "apache/kafka:4.3.1"
	// sessionMin is less than Kafka's 6 s, so that tests do not have to wait that long for a dead
	// member.
	sessionMin = 500 * time.Millisecond
)

// KafkaOptions are the options of StartKafka. The zero value uses the cluster that the environment
// names, or what the machine has.
type KafkaOptions struct {
	// Brokers are the addresses of a cluster to use, as host:port. Default: the environment's
	// KAFKA_BROKERS, split at commas.
	Brokers []string
	// Own asks for a cluster that no other program uses: the environment's KAFKA_BROKERS is
	// ignored.
	Own bool
	// Embedded asks for kfake even if there are KAFKA_BROKERS and a Docker engine.
	Embedded bool
	// Settings are settings of the broker in a container, by their names in server.properties.
	Settings map[string]string
	// Fake are further options of kfake.
	Fake []kfake.Opt
}

// Kafka is a running Kafka or kfake. It does not create topics automatically.
type Kafka struct {
	Server

	Brokers []string
	Fake    *kfake.Cluster // nil unless it is kfake
}

// StartKafka starts a Kafka, or connects to an external one, and returns once it answers. The
// caller has to call Stop.
func StartKafka(ctx context.Context, opts KafkaOptions) (*Kafka, error) {
	brokers := strings.Join(opts.Brokers, ",")
	if brokers == "" && !opts.Own {
		brokers = env("KAFKA_BROKERS")
	}
	kind, err := choose(ctx, opts.Embedded, brokers)
	if err != nil {
		return nil, fmt.Errorf("start Kafka: %w", err)
	}
	k := &Kafka{Server: Server{Kind: kind, backend: external}, Brokers: strings.Split(brokers, ",")}
	k.ready = k.metadata
	name := "Kafka"
	switch kind {
	case KindExternal:
		err = k.metadata(ctx)
	case KindContainer:
		name = kafkaImage
		err = launch(ctx, func(port int) (*Server, error) { return k.inContainer(ctx, port, opts.Settings) })
	case KindEmbedded:
		name = "kfake"
		err = k.inProcess(opts.Fake)
	}
	if err != nil && replaceable(ctx, kind) {
		return embeddedInstead(err, func() (*Kafka, error) { opts.Embedded = true; return StartKafka(ctx, opts) })
	}
	if err != nil {
		return nil, fmt.Errorf("start Kafka (%s): %w", kind, err)
	}
	k.Description = fmt.Sprintf("%s %s (%s)", name, kind, strings.Join(k.Brokers, ","))
	return k, nil
}

// metadata checks that the cluster answers and has a usable broker: a KRaft node opens its port
// before the controller admits it.
func (k *Kafka) metadata(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(k.Brokers...))
	if err != nil {
		return err
	}
	defer client.Close()
	m, err := kadm.NewClient(client).BrokerMetadata(ctx)
	if err == nil && len(m.Brokers) == 0 {
		err = errors.New("the cluster has no broker yet")
	}
	return err
}

func (k *Kafka) inContainer(ctx context.Context, port int, settings map[string]string) (*Server, error) {
	address := fmt.Sprintf("127.0.0.1:%d", port)
	k.Brokers = []string{address}
	all := map[string]string{
		"node.id":                  "1",
		"process.roles":            "broker,controller",
		"controller.quorum.voters": "1@localhost:9093",
		// The broker reaches itself through BROKER. The published address does not work inside the
		// container: transactions, whose coordinator writes markers through it, would hang.
		"listeners":                      "PLAINTEXT://:9092,CONTROLLER://localhost:9093,BROKER://localhost:9094",
		"advertised.listeners":           "PLAINTEXT://" + address + ",BROKER://localhost:9094",
		"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,BROKER:PLAINTEXT",
		"controller.listener.names":      "CONTROLLER",
		"inter.broker.listener.name":     "BROKER",
		"log.dirs":                       "/tmp/kraft-combined-logs",
		// One broker holds the only replica of everything, in fewer partitions than the 50 of a
		// real cluster: all are created at first use, and a test waits for that.
		"offsets.topic.replication.factor":                 "1",
		"offsets.topic.num.partitions":                     "4",
		"transaction.state.log.replication.factor":         "1",
		"transaction.state.log.min.isr":                    "1",
		"transaction.state.log.num.partitions":             "4",
		"share.coordinator.state.topic.replication.factor": "1",
		"share.coordinator.state.topic.min.isr":            "1",
		// After a kill the controller admits the broker again when its earlier session is over: 9 s
		// by default.
		"broker.session.timeout.ms":        "3000",
		"broker.heartbeat.interval.ms":     "500",
		"auto.create.topics.enable":        "false",
		"group.initial.rebalance.delay.ms": "0",
		"group.min.session.timeout.ms":     fmt.Sprint(sessionMin.Milliseconds()),
	}
	maps.Copy(all, settings)
	variables := map[string]string{"KAFKA_HEAP_OPTS": "-Xmx512m"}
	// How the image spells a property as an environment variable.
	spell := strings.NewReplacer(".", "_", "-", "___", "_", "__")
	for name, value := range all {
		variables["KAFKA_"+strings.ToUpper(spell.Replace(name))] = value
	}
	var err error
	k.backend, err = createContainer(ctx, port, testcontainers.ContainerRequest{
		Image:        kafkaImage,
		ExposedPorts: []string{"9092/tcp"},
		Env:          variables,
	})
	return &k.Server, err
}

func (k *Kafka) inProcess(options []kfake.Opt) error {
	fake, err := kfake.NewCluster(append([]kfake.Opt{kfake.GroupMinSessionTimeout(sessionMin)}, options...)...)
	if err != nil {
		return err
	}
	k.Fake, k.Brokers = fake, fake.ListenAddrs()
	k.backend = outside{"kill Kafka: kfake has no process to kill; start a Docker engine, or inject faults through Fake", fake.Close}
	running.Store(&k.Server, nil)
	return nil
}
