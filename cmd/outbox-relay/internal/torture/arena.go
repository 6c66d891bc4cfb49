package torture

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/migrations"
)

// arena is the servers of a run. They are its own, because it kills them.
type arena struct {
	postgres *servers.Postgres
	standby  *servers.Postgres // nil: none
	kafka    *servers.Kafka
	brokers  int           // of Kafka
	standbys bool          // each round begins with a standby
	offset   time.Duration // of the database's clock
	noDump   error         // why the database cannot be dumped; nil: it can
	pooler   bool          // there is a PgBouncer
}

// openArena starts the servers: containers where an engine answers, unless embedded, else
// PostgreSQL from binaries and kfake.
func openArena(ctx context.Context, embedded bool, offset time.Duration, brokers int) (*arena, error) {
	postgres, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Embedded: embedded, ClockOffset: offset, Parameters: map[string]string{
		"max_connections": "300", "max_prepared_transactions": "20", "wal_level": "logical", "max_wal_size": "4GB",
		"shared_buffers": "512MB", "deadlock_timeout": "200ms", "wal_writer_delay": "5s",
		// A crash of the server, not of the machine, is what this run injects: the kernel keeps what
		// was written.
		"fsync": "off",
	}})
	if err != nil {
		return nil, err
	}
	kafka, err := servers.StartKafka(ctx, servers.KafkaOptions{Own: true, Embedded: embedded, Count: brokers})
	if err != nil {
		return nil, errors.Join(err, postgres.Stop(context.WithoutCancel(ctx)))
	}
	_, _, err = servers.FindPooler(ctx)
	return &arena{pooler: err == nil, postgres: postgres, kafka: kafka, offset: offset, brokers: brokers, noDump: postgres.CanDump(ctx)}, nil
}

// stream starts a standby if there is none: the last one may have been promoted.
func (a *arena) stream(ctx context.Context) (err error) {
	if a.standby == nil {
		a.standby, err = servers.StartStandby(ctx, a.postgres)
	}
	return err
}

// promote lets the standby take over from the primary, which dies; what the primary commits while it
// lasts is lost.
func (a *arena) promote(ctx context.Context, lasts time.Duration) error {
	conn, err := pgx.Connect(ctx, a.standby.URL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for _, sql := range []string{`ALTER SYSTEM SET primary_conninfo = ''`, `SELECT pg_reload_conf()`} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	pause.For(ctx, lasts)
	if err := a.postgres.Stop(ctx); err != nil {
		return err
	}
	a.postgres, a.standby = a.standby, nil
	_, err = conn.Exec(ctx, `SELECT pg_promote()`)
	return err
}

func (a *arena) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	err := errors.Join(a.postgres.Stop(ctx), a.kafka.Stop(ctx))
	if a.standby != nil {
		err = errors.Join(err, a.standby.Stop(ctx))
	}
	return err
}

// environment names what totals are kept for.
func (a *arena) environment() string {
	text := string(a.postgres.Kind) + " PostgreSQL, " + string(a.kafka.Kind) + " Kafka"
	if a.brokers > 1 {
		text += " of " + strconv.Itoa(a.brokers) + " brokers"
	}
	if a.standbys {
		text += ", with a standby"
	}
	if a.noDump != nil {
		text += ", no pg_dump"
	}
	if !a.pooler {
		text += ", no PgBouncer"
	}
	if a.offset != 0 {
		text += ", the database's clock off by " + a.offset.String()
	}
	return text
}

func (a *arena) abilities() Abilities {
	return Abilities{
		KillKafka: a.kafka.Kind == servers.KindContainer, Promote: a.standbys, Brokers: a.brokers, Fake: a.kafka.Fake != nil,
		Dump: a.noDump == nil && !a.standbys, Pooler: a.pooler,
	}
}

// site is what one round has of the arena: a database, and topics that begin with a name.
type site struct {
	arena       *arena
	name        string
	databaseURL string        // as a superuser
	secret      string        // password of all logins: it may be nowhere in what the processes write
	pool        *pgxpool.Pool // as a superuser, past all proxies
	client      *kgo.Client
	admin       *kadm.Client
	brokers     []string   // as the cluster calls them
	offsets     sync.Mutex // offsets of groups, and the starts of topics, are changed by one at a time
}

// lay creates database, tables and topics of a round.
func (a *arena) lay(ctx context.Context, sc scene.Scene) (_ *site, err error) {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand documents it
	s := &site{arena: a, name: "torture_" + hex.EncodeToString(random[:]), secret: "secret-" + rand.Text()}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("prepare the round: %w", err), s.clear(ctx))
		}
	}()
	if a.standbys {
		if err := a.stream(ctx); err != nil {
			return nil, err
		}
	}
	conn, err := pgx.Connect(ctx, a.postgres.URL)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+s.name); err != nil {
		return nil, err
	}
	if s.databaseURL, err = a.url(s.name); err != nil {
		return nil, err
	}
	if s.pool, err = pgxpool.New(ctx, s.databaseURL); err != nil {
		return nil, err
	}
	return s, errors.Join(s.tables(ctx, sc), s.topics(ctx, sc))
}

// url leads to a database of the primary, whichever server that is.
func (a *arena) url(database string) (string, error) {
	u, err := url.Parse(a.postgres.URL)
	if err != nil {
		return "", err
	}
	u.Path = "/" + database
	if a.standby == nil {
		return u.String(), nil
	}
	second, err := url.Parse(a.standby.URL)
	if err != nil {
		return "", err
	}
	u.Host += "," + second.Host
	query := u.Query()
	query.Set("target_session_attrs", "read-write")
	query.Set("connect_timeout", "5")
	u.RawQuery = query.Encode()
	return u.String(), nil
}

func (s *site) tables(ctx context.Context, sc scene.Scene) error {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if err := migrations.Up(ctx, conn.Conn(), migrations.Options{}); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, scene.TablesSQL); err != nil {
		return err
	}
	roles, err := migrations.Roles(migrations.Options{}, "")
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, roles); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, strings.ReplaceAll(scene.LoginsSQL, "$secret", s.secret)); err != nil {
		return err
	}
	if sc.Lazy {
		if err := makeLazy(ctx, conn.Conn(), s.name); err != nil {
			return err
		}
	}
	groups := make([]int16, 0, len(sc.Groups))
	for _, g := range sc.Groups {
		groups = append(groups, g.Number)
	}
	_, err = conn.Exec(ctx, scene.RowsSQL, sc.Keys, groups)
	return err
}

func (s *site) topics(ctx context.Context, sc scene.Scene) (err error) {
	if s.client, err = kgo.NewClient(kgo.SeedBrokers(s.arena.kafka.Brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner())); err != nil {
		return err
	}
	s.admin = kadm.NewClient(s.client)
	j := worker.Job{Topic: s.name}
	names := []string{s.name}
	for _, g := range sc.Groups {
		if g.Children {
			names = append(names, j.ChildTopic(g.Number))
		}
		if g.Journal {
			names = append(names, j.JournalTopic(g.Number))
		}
		if g.DeadLetter {
			names = append(names, j.DeadTopic(g.Number))
		}
	}
	made, err := s.admin.CreateTopics(ctx, int32(sc.Partitions), -1, nil, names...)
	if err == nil {
		err = made.Error()
	}
	if err != nil {
		return err
	}
	if sc.SmallRecords {
		if err := s.limitRecords(ctx, s.name, smallRecords); err != nil {
			return err
		}
	}
	brokers, err := s.admin.ListBrokers(ctx)
	for _, b := range brokers {
		s.brokers = append(s.brokers, net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port))))
	}
	return err
}

// Bytes of the largest batch of records: with the first, rare records are refused until the operator
// sets the second.
const (
	smallRecords  = 16 << 10
	normalRecords = 1<<20 + 12 // Kafka's default
	largeRecords  = 4 << 20
)

// limitRecords sets a topic's max.message.bytes.
func (s *site) limitRecords(ctx context.Context, topic string, bytes int) error {
	value := strconv.Itoa(bytes)
	changed, err := s.admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "max.message.bytes", Value: &value}}, topic)
	if err != nil {
		return err
	}
	_, err = changed.On(topic, func(r *kadm.AlterConfigsResponse) error { return r.Err })
	return err
}

// makeLazy lets a database not flush commits by default. What producers confirm is there after a crash
// all the same; the other parts see to that by themselves.
func makeLazy(ctx context.Context, conn *pgx.Conn, database string) error {
	_, err := conn.Exec(ctx, "ALTER DATABASE "+database+" SET synchronous_commit = off")
	if err == nil {
		_, err = conn.Exec(ctx, "ALTER ROLE "+loginPrefix+"publisher IN DATABASE "+database+" SET synchronous_commit = on")
	}
	return err
}

// loginPrefix begins the names of all logins of scene.LoginsSQL.
const loginPrefix = "torture_"

// as is the URL of the round's database for a login that has only the rights of its part.
func (s *site) as(login string) (string, error) {
	u, err := url.Parse(s.databaseURL)
	if err != nil {
		return "", err
	}
	u.User = url.UserPassword(loginPrefix+login, s.secret)
	return u.String(), nil
}

// rollBackPrepared ends all prepared transactions of the round's database.
func (s *site) rollBackPrepared(ctx context.Context) error {
	rows, _ := s.pool.Query(ctx, `SELECT gid FROM pg_prepared_xacts WHERE database = current_database()`)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, name := range names {
		_, failed := s.pool.Exec(ctx, "ROLLBACK PREPARED '"+name+"'")
		err = errors.Join(err, failed)
	}
	return err
}

// clear removes what lay created.
func (s *site) clear(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	var problems []error
	if s.admin != nil {
		topics, err := s.admin.ListTopics(ctx)
		problems = append(problems, err)
		var mine []string
		for _, name := range topics.Names() {
			if len(name) >= len(s.name) && name[:len(s.name)] == s.name {
				mine = append(mine, name)
			}
		}
		if len(mine) > 0 {
			_, err = s.admin.DeleteTopics(ctx, mine...)
			problems = append(problems, err)
		}
		s.client.Close()
	}
	if s.pool != nil {
		problems = append(problems, s.rollBackPrepared(ctx)) // they would keep the database; the judge has seen them
		s.pool.Close()
	}
	conn, err := pgx.Connect(ctx, s.arena.postgres.URL)
	if err != nil {
		return errors.Join(append(problems, err)...)
	}
	defer func() { _ = conn.Close(ctx) }()
	// A rival's walsender that is still there would keep the database.
	if _, err := conn.Exec(ctx, `SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE database = $1 AND active_pid IS NOT NULL`, s.name); err != nil {
		problems = append(problems, err)
	}
	_, err = conn.Exec(ctx, "DROP DATABASE IF EXISTS "+s.name+" WITH (FORCE)")
	return errors.Join(append(problems, err)...)
}
