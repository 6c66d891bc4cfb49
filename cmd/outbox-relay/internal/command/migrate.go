package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/migrations"
)

func newMigrate(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Create, upgrade, check, print or remove the tables, and their roles",
	}
	cmd.AddCommand(newMigrateUp(s), newMigrateDown(s), newMigrateStatus(s), newMigratePrint(s), newMigrateRoles(s))
	return cmd
}

// migrated is what "migrate up" and "migrate down" print.
type migrated struct {
	Schema string `json:"schema"`
	From   int    `json:"from"`
	To     int    `json:"to"`
}

func (m migrated) print(out io.Writer, asJSON bool) error {
	change := fmt.Sprintf("was %d", m.From)
	if m.From == m.To {
		change = "nothing to do"
	}
	return say(out, asJSON, m, "schema %s: version %d, %s\n", m.Schema, m.To, change)
}

func newMigrateUp(s *cli.Settings) *cobra.Command {
	var lockWait time.Duration
	cmd := cli.Needs(&cobra.Command{
		Use:   "up",
		Short: "Create the tables, or upgrade them to this program's version",
		Long: `Create the tables, or upgrade them to this program's version. Of several processes one works; the others wait and then
find nothing to do. Connect to the primary, and not through a transaction pooler: the lock belongs to the session.

Relays and consumers of the previous release may run during and after it; then replace them. A migration waits at most
1.5 s at a time for table locks, so that claims do not queue behind it for longer. If others hold the locks, it logs
who, pauses and retries, until --lock-wait.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return migrate(cmd.Context(), s, func(ctx context.Context, conn *pgx.Conn, state migrations.State) error {
				if err := migrations.Up(ctx, conn, patient(cmd, s, lockWait)); err != nil {
					return err
				}
				// Up does not change a newer schema.
				return migrated{state.Schema, state.Current, max(state.Current, state.Latest)}.print(cmd.OutOrStdout(), s.JSON)
			})
		},
	}, cli.FlagDatabaseURL)
	addLockWait(cmd.Flags(), &lockWait)
	s.AddJSON(cmd)
	return cmd
}

// patient returns the options for changes of the tables.
func patient(cmd *cobra.Command, s *cli.Settings, lockWait time.Duration) migrations.Options {
	return migrations.Options{Schema: s.Schema, LockWaitMax: lockWait, Logger: s.Logger(cmd.ErrOrStderr())}
}

func addLockWait(flags *pflag.FlagSet, target *time.Duration) {
	cli.AddDuration(flags, target, "lock-wait", 5*time.Minute, time.Second, 24*time.Hour, "give up if other transactions hold locks for this long")
}

// migrate opens a connection and reads the version before work.
func migrate(ctx context.Context, s *cli.Settings, work func(context.Context, *pgx.Conn, migrations.State) error) error {
	conn, err := s.Connect(ctx)
	if err != nil {
		return err
	}
	defer cli.HangUp(ctx, conn)
	state, err := migrations.Status(ctx, conn, migrations.Options{Schema: s.Schema})
	if err != nil {
		return err
	}
	return work(ctx, conn, state)
}

func newMigrateDown(s *cli.Settings) *cobra.Command {
	var yes bool
	var lockWait time.Duration
	to := -1
	cmd := cli.Needs(&cobra.Command{
		Use:   "down --to VERSION --yes",
		Short: "Go back to an older version; data that it does not know is lost",
		Long: `Go back to an older version; 0 removes all tables. Their data is lost: unpublished outbox rows, claims (redelivered
messages take effect again) and positions. Without --yes it only prints the loss. It waits for locks as "up" does.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return migrate(cmd.Context(), s, func(ctx context.Context, conn *pgx.Conn, state migrations.State) error {
				switch {
				case to < 0:
					return usageError{errors.New("--to is missing: want the version to go back to, 0 to remove everything")}
				case to > state.Current:
					return usageError{fmt.Errorf("--to %d: the database has version %d; \"outbox-relay migrate up\" goes forward", to, state.Current)}
				case to < state.Current && !yes:
					return usageError{fmt.Errorf("migrate down from version %d to %d would lose %s; repeat it with --yes if that is meant",
						state.Current, to, loss(ctx, conn, s.Schema, to, state.Current))}
				}
				if to < state.Current {
					if err := migrations.To(ctx, conn, patient(cmd, s, lockWait), to); err != nil {
						return err
					}
				}
				return migrated{state.Schema, state.Current, to}.print(cmd.OutOrStdout(), s.JSON)
			})
		},
	}, cli.FlagDatabaseURL)
	addVersionFlag(cmd.Flags(), &to, "to", 0, "version to go back to; 0 removes everything")
	addLockWait(cmd.Flags(), &lockWait)
	cli.AddBool(cmd.Flags(), &yes, cli.FlagYes, "yes, lose what the removed tables hold")
	s.AddJSON(cmd)
	return cmd
}

// addVersionFlag adds a flag that has no default: the target keeps its value unless it is given.
func addVersionFlag(flags *pflag.FlagSet, target *int, name string, lowest int, usage string) {
	cli.AddOption(flags, name, "version", "", usage, func(text string) error {
		all, err := migrations.All(migrations.Options{})
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < lowest || n > len(all) {
			return fmt.Errorf("want a version, %d to %d", lowest, len(all))
		}
		*target = n
		return nil
	})
}

// loss describes what would be lost below a version, if it can be counted.
func loss(ctx context.Context, conn *pgx.Conn, schema string, to, from int) string {
	var lost []string
	add := func(n int64, exact bool, otherwise, what string) {
		if exact {
			otherwise = ""
		}
		if n > 0 {
			lost = append(lost, otherwise+human.Count(n, what))
		}
	}
	if to < 1 {
		shards, err := pipeline.ShardsOf(ctx, conn, schema, "")
		if err == nil {
			err = pipeline.Count(ctx, conn, schema, shards, pipeline.CountMax)
		}
		if err != nil {
			return uncounted
		}
		waiting, exact := map[string]int64{}, true
		for _, s := range shards {
			waiting[s.Relay] += s.Waiting
			exact = exact && s.WaitingExact
		}
		add(slices.Max(slices.Collect(maps.Values(waiting))), exact, "about ", "unpublished outbox row")
	}
	for _, table := range []struct {
		version    int
		what, rows string
	}{
		{1, "message for later", "effectonce.outbox_scheduled"},
		{1, "dead row", "effectonce.outbox_dead WHERE state <> 'discarded'"},
		{2, "parked message", "effectonce.parked_messages"},
		{2, "claim", "(SELECT FROM effectonce.processed_messages UNION ALL SELECT FROM effectonce.processed_forever) claims"},
		{2, "position", "effectonce.consumer_positions"},
		{2, "version fence", "effectonce.fences"},
		{3, "idempotency key", "effectonce.idempotency_keys"},
	} {
		if table.version <= to || table.version > from {
			continue
		}
		var n int64
		sql := migrations.InSchema("SELECT count(*) FROM (SELECT FROM "+table.rows+" LIMIT $1) rows", schema)
		if err := conn.QueryRow(ctx, sql, pipeline.CountMax).Scan(&n); err != nil {
			return uncounted
		}
		add(n, n < pipeline.CountMax, "at least ", table.what)
	}
	return cmp.Or(strings.Join(lost, ", "), "what is published and done") + " (without claims, redelivered messages take effect again)"
}

const uncounted = "what the removed tables hold (it cannot be counted)"

// schemaState is what "migrate status" prints.
type schemaState struct {
	Schema  string `json:"schema"`
	Current int    `json:"current"`
	Latest  int    `json:"latest"`
	State   string `json:"state"` // current, compatible, missing, old or new
}

func newMigrateStatus(s *cli.Settings) *cobra.Command {
	cmd := cli.Needs(&cobra.Command{
		Use:   "status",
		Short: "Compare the tables' version with this program's",
		Long: `Compare the tables' version with this program's. Exit status 1 if this program does not work with the tables. A newer
version is compatible if its release says so.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return migrate(cmd.Context(), s, func(_ context.Context, _ *pgx.Conn, state migrations.State) error {
				return printSchemaState(cmd.OutOrStdout(), state, s.JSON)
			})
		},
	}, cli.FlagDatabaseURL)
	s.AddJSON(cmd)
	return cmd
}

func printSchemaState(out io.Writer, state migrations.State, asJSON bool) error {
	s := schemaState{Schema: state.Schema, Current: state.Current, Latest: state.Latest, State: "current"}
	remedy := "current"
	switch {
	case state.Current == 0:
		s.State, remedy = "missing", "not installed: run \"outbox-relay migrate up\""
	case state.Current < state.Latest:
		s.State, remedy = "old", "too old: run \"outbox-relay migrate up\""
	case state.Compatible():
		s.State, remedy = "compatible", "newer, and this program works with it"
	case state.Current > state.Latest:
		s.State, remedy = "new", "too new: update this program"
	}
	text := terminal.Fill("schema %s: version %d, this program has %d: %s\n", s.Schema, s.Current, s.Latest, remedy)
	return answer(out, asJSON, s, text, s.State == "current" || s.State == "compatible")
}
