// Package site is where the demo and the benchmarks work: a schema, topics and consumer groups of
// one run, which are removed with it. It uses nothing that exists already.
package site

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/migrations"
)

// removeMax bounds the removal: a server that does not answer must not block the terminal.
const removeMax = 30 * time.Second

// Site is what a run made.
type Site struct {
	Schema string // with the tables of effectonce
	Client *kgo.Client
	Admin  *kadm.Client

	databaseURL    string
	made           bool // the schema
	topics, groups []string
}

// Name returns the name of a schema. It is random, so that two runs do not conflict.
func Name(prefix string) string {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand documents it
	return prefix + hex.EncodeToString(random[:])
}

// New makes the schema. After an error nothing of it remains.
func New(ctx context.Context, databaseURL string, brokers []string, schema, maker string) (_ *Site, err error) {
	s := &Site{Schema: schema, databaseURL: databaseURL}
	if s.Client, err = kgo.NewClient(kgo.SeedBrokers(brokers...)); err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	s.Admin = kadm.NewClient(s.Client)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Remove(ctx))
		}
	}()
	conn, hangUp, err := s.Connect(ctx)
	if err != nil {
		return nil, err
	}
	defer hangUp()
	if err := ownschema.MakeNew(ctx, conn, schema, maker); err != nil {
		return nil, err
	}
	s.made = true
	return s, migrations.Up(ctx, conn, migrations.Options{Schema: schema})
}

// Remove removes everything that was made, and closes the client. It also works after ctx was
// cancelled.
func (s *Site) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeMax)
	defer cancel()
	defer s.Client.Close()
	if len(s.groups) > 0 {
		// Groups may have members that were killed; they expire by themselves.
		_, _ = s.Admin.DeleteGroups(ctx, s.groups...)
	}
	var problem error
	if len(s.topics) > 0 {
		deleted, err := s.Admin.DeleteTopics(ctx, s.topics...)
		if err = errors.Join(err, deleted.Error()); err != nil && !errors.Is(err, kerr.UnknownTopicOrPartition) {
			problem = fmt.Errorf("delete topics %q, which still exist: %w", s.topics, err)
		}
	}
	return errors.Join(problem, s.dropSchema(ctx))
}

func (s *Site) dropSchema(ctx context.Context) error {
	if !s.made {
		return nil
	}
	conn, hangUp, err := s.Connect(ctx)
	if err == nil {
		defer hangUp()
		_, err = conn.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{s.Schema}.Sanitize()+" CASCADE")
	}
	if err != nil {
		return fmt.Errorf("drop schema %s, which still exists: %w", s.Schema, err)
	}
	return nil
}

// Topic makes a topic, which must not exist yet.
func (s *Site) Topic(ctx context.Context, name string, partitions int) error {
	// -1 leaves the number of replicas to the cluster.
	_, err := s.Admin.CreateTopic(ctx, int32(partitions), -1, nil, name)
	if !errors.Is(err, kerr.TopicAlreadyExists) { // after another error it may have been made
		s.topics = append(s.topics, name)
	}
	if err != nil {
		return fmt.Errorf("create topic %s: %w", name, err)
	}
	return nil
}

// Group adds a consumer group that is removed with the site.
func (s *Site) Group(name string) { s.groups = append(s.groups, name) }

// Ends returns the end offsets of a topic.
func (s *Site) Ends(ctx context.Context, topic string) (kadm.ListedOffsets, error) {
	ends, err := s.Admin.ListEndOffsets(ctx, topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("read the end offsets of topic %s: %w", topic, err)
	}
	return ends, nil
}

// Connect opens a connection. The function closes it, also after ctx was cancelled.
func (s *Site) Connect(ctx context.Context) (*pgx.Conn, func(), error) {
	conn, err := pgx.Connect(ctx, s.databaseURL)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return conn, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ctx) // an error no longer matters
	}, nil
}
