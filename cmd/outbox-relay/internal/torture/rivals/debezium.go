package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/outbox"
)

// debeziumRival has an outbox table in Debezium's layout, a worker of Kafka Connect with the outbox
// event router as its relay, and plain consumers.
type debeziumRival struct{ claims bool }

//go:embed debezium.pom.xml
var pom []byte

const (
	debeziumVersion = "3.7.0.Final" // as in the file embedded above
	connectVersion  = "4.3.1"
)

func debeziumSettings() string {
	return "Debezium " + debeziumVersion + " on Kafka Connect " + connectVersion + ", one distributed worker (heap of 384 MB). " +
		"Writers: an insert into an outbox table with the columns of the outbox event router, in the transaction of the order. " +
		"Connector: `pgoutput`, `snapshot.mode=initial`, `poll.interval.ms=50`, `EventRouter` that routes by `aggregatetype` and puts the event ID into a header, " +
		"retries without limit (the default) every second, a slot that is busy is tried 30 times every 2 s. " +
		"Worker: `offset.flush.interval.ms=1000`, `scheduled.rebalance.max.delay.ms=0`, sessions of 6 s, at-least-once (the default). " +
		"A watchdog beside it restarts a connector or a task that failed, every second. " +
		"Its way to Kafka has no proxy: network faults strike its way to PostgreSQL only."
}

// cache is where fetch puts what Maven Central has.
func cache() (string, error) {
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "effectonce-rivals", "debezium-"+debeziumVersion+"-connect-"+connectVersion), err
}

// debeziumReady reports what is missing.
func debeziumReady() error {
	if _, err := exec.LookPath("java"); err != nil {
		return errors.New("there is no java in the path")
	}
	dir, err := cache()
	if err != nil {
		return err
	}
	if jars, _ := filepath.Glob(filepath.Join(dir, "debezium-connector-postgres-*.jar")); len(jars) == 0 {
		return fmt.Errorf("its files are not in %s: run the rivals' program with fetch, which needs Maven", dir)
	}
	return canReplace()
}

// fetch downloads Debezium and Kafka Connect.
func fetch(ctx context.Context) error {
	dir, err := cache()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	project := filepath.Join(dir, "pom.xml")
	if err := os.WriteFile(project, pom, 0o600); err != nil {
		return err
	}
	maven := exec.CommandContext(ctx, "mvn", "-q", "-B", "-f", project, "dependency:copy-dependencies", "-DoutputDirectory="+dir)
	maven.Stdout, maven.Stderr = os.Stdout, os.Stderr
	return maven.Run()
}

const publication = "torture"

// Prepare creates the outbox table and its publication, and lets the relay replicate.
func (debeziumRival) Prepare(ctx context.Context, pool *pgxpool.Pool, _ worker.Job) error {
	_, err := pool.Exec(ctx, `
CREATE TABLE shop.outboxevent (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text NOT NULL, type text NOT NULL, payload jsonb);
GRANT INSERT ON shop.outboxevent TO torture_publisher, torture_consumer;
GRANT SELECT ON shop.outboxevent TO torture_relay;
ALTER ROLE torture_relay REPLICATION;
CREATE PUBLICATION torture FOR TABLE shop.outboxevent`)
	return err
}

const debeziumPublishSQL = `-- debezium.publish
INSERT INTO shop.outboxevent (id, aggregatetype, aggregateid, type, payload)
SELECT id, topic, key, 'order', payload::jsonb FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY AS m (id, topic, key, payload, n) ORDER BY n`

// Publish inserts into the outbox table.
func (debeziumRival) Publish(ctx context.Context, tx pgx.Tx, messages ...outbox.Message) error {
	var ids []uuid.UUID
	var topics, keys, payloads []string
	for _, m := range messages {
		if m.ID == uuid.Nil {
			m.ID = uuid.Must(uuid.NewV7())
		}
		ids, topics, keys, payloads = append(ids, m.ID), append(topics, m.Topic), append(keys, string(m.Key)), append(payloads, string(m.Payload))
	}
	_, err := tx.Exec(ctx, debeziumPublishSQL, ids, topics, keys, payloads)
	return err
}

// Consume consumes plainly.
func (d debeziumRival) Consume(ctx context.Context, pool *pgxpool.Pool, j worker.Job, logger *slog.Logger) error {
	return worker.ConsumePlainly(ctx, pool, j, logger, d, d.claims)
}

// Relay replaces this process with a worker of Kafka Connect, so that what strikes it strikes the
// worker. The watchdog, a process of its own, creates the connector.
func (debeziumRival) Relay(ctx context.Context, _ *pgxpool.Pool, j worker.Job, _ *slog.Logger) error {
	address, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	properties := filepath.Join(j.Ledgers, j.Name+".properties")
	if err := os.WriteFile(properties, []byte(workerProperties(j, address)), 0o600); err != nil {
		return err
	}
	config, err := connectorConfig(j)
	if err != nil {
		return err
	}
	if err := startWatchdog(watchdog{Connector: "http://" + address + "/connectors/orders", Config: config, Worker: os.Getpid()}); err != nil {
		return err
	}
	dir, err := cache()
	if err != nil {
		return err
	}
	return replace("java", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=info",
		"-Dorg.slf4j.simpleLogger.showDateTime=true", "-cp", filepath.Join(dir, "*"), "org.apache.kafka.connect.cli.ConnectDistributed", properties)
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

func workerProperties(j worker.Job, address string) string {
	lines := []string{
		"bootstrap.servers=" + strings.Join(j.Brokers, ","), "group.id=" + j.Topic + "-connect", "listeners=http://" + address,
		"config.storage.topic=" + j.Topic + "-connect-configs", "offset.storage.topic=" + j.Topic + "-connect-offsets", "status.storage.topic=" + j.Topic + "-connect-status",
		"config.storage.replication.factor=1", "offset.storage.replication.factor=1", "status.storage.replication.factor=1",
		"offset.storage.partitions=1", "status.storage.partitions=1", "offset.flush.interval.ms=1000",
		"key.converter=org.apache.kafka.connect.storage.StringConverter", "value.converter=org.apache.kafka.connect.storage.StringConverter",
		fmt.Sprintf("session.timeout.ms=%d", worker.Session.Milliseconds()), "heartbeat.interval.ms=500", "rebalance.timeout.ms=10000",
		"scheduled.rebalance.max.delay.ms=0", "plugin.discovery=service_load", "",
	}
	return strings.Join(lines, "\n")
}

func connectorConfig(j worker.Job) (map[string]string, error) {
	database, err := pgx.ParseConfig(j.DatabaseURL)
	if err != nil {
		return nil, err
	}
	return map[string]string{
		"connector.class": "io.debezium.connector.postgresql.PostgresConnector", "tasks.max": "1", "plugin.name": "pgoutput",
		"slot.name": j.Topic, "publication.name": publication, "publication.autocreate.mode": "disabled",
		"database.hostname": database.Host, "database.port": fmt.Sprint(database.Port), "database.dbname": database.Database,
		"database.user": database.User, "database.password": database.Password, "database.sslmode": "disable",
		"topic.prefix": j.Topic + "-debezium", "table.include.list": "shop.outboxevent", "snapshot.mode": "initial", "tombstones.on.delete": "false",
		"poll.interval.ms": "50", "retriable.restart.connector.wait.ms": "1000", "slot.max.retries": "30", "slot.retry.delay.ms": "2000",
		"transforms": "outbox", "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
		"transforms.outbox.route.topic.replacement":           "${routedByValue}",
		"transforms.outbox.table.fields.additional.placement": "id:header:" + worker.HeaderID,
	}, nil
}
