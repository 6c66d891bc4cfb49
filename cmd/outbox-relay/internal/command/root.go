// Package command has the commands of outbox-relay: a file for each noun.
package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// Exit codes.
const (
	exitDone    = 0
	exitNotWell = 1
	exitUsage   = 2
)

// usageError is a usage error that is only detected while a command runs.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// commands returns the constructors of all commands. The settings are complete before a command
// runs.
func commands() []func(*cli.Settings) *cobra.Command {
	return append(tryout(), newRun, newReady, newMigrate, newStatus, newPositions, newExplain, newVerify, newTail, newReplay,
		newDead, newTopics, newShards, newRelays, newRepair, newConsumer, newParked, newKeys, newActions,
		newDoctor, newPrune, newVersion)
}

// group is a command that only has subcommands.
func group(cmd *cobra.Command, subs ...*cobra.Command) *cobra.Command {
	cmd.AddCommand(subs...)
	return cmd
}

// Program runs the command line of this process, and returns its exit status.
func Program() int {
	asked, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// The first signal asks the command to stop; the second one ends the process at once. The
	// default handling is restored before the command sees the first signal, so that its log line
	// about the second one is true.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	context.AfterFunc(asked, func() {
		stop()
		cancel()
	})
	return execute(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr)
}

// execute runs one command line and returns the exit code. It gets the process's state as
// arguments, so that tests can run commands in parallel.
func execute(ctx context.Context, args []string, lookup func(name string) (value string, found bool), stdout, stderr io.Writer) int {
	s := cli.NewSettings(lookup)
	out, problems := terminal.NewWriter(stdout), terminal.NewWriter(stderr)
	defer out.Flush()
	defer problems.Flush()
	root := newRoot(s, out, problems)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, errUnhealthy):
		return exitNotWell
	case ctx.Err() != nil:
		err = fmt.Errorf("interrupted: %w", err) // it says what was done
	}
	if pgerr.Is(err, pgerr.InsufficientPrivilege) {
		err = fmt.Errorf("%w: \"outbox-relay doctor\" lists the rights that the role lacks", err)
	}
	text := "error: " + strings.ReplaceAll(err.Error(), "\n", "\nerror: ") + "\n"
	_, _ = io.WriteString(problems, text) // if this fails, only the exit status reports the error
	// An error before the command runs is a usage error.
	if errors.As(err, &usageError{}) || !s.Resolved() {
		return exitUsage
	}
	return exitNotWell
}

// newRoot returns the command tree.
func newRoot(s *cli.Settings, stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "outbox-relay",
		Short: "Publish the outbox table to Kafka, and operate the pipeline",
		Long: `outbox-relay publishes the rows of the outbox table to Kafka, in order for each key. It is also
the operator's tool for the pipeline.

Flags can be set in the environment: --database-url by OUTBOX_DATABASE_URL or DATABASE_URL, --brokers
by OUTBOX_BROKERS or KAFKA_BROKERS, --lease by OUTBOX_LEASE and so on. A flag wins over OUTBOX_...,
and that wins over the general name. Flags that choose what a command changes have no variable.

"outbox-relay actions list" shows who changed what, when and why. Commands record their changes there, with --by and
--why.

Exit status: 0 success, 1 not well or failed, 2 wrong use.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(flagError)
	s.AddFlags(root.PersistentFlags())
	for _, build := range commands() {
		c := build(s)
		c.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return s.Resolve(cmd) }
		root.AddCommand(c)
	}
	root.AddCommand(newConnection())
	root.SetHelpCommand(newHelp())
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		cli.ConnectionFlags().VisitAll(func(f *pflag.Flag) { root.PersistentFlags().Lookup(f.Name).Hidden = true })
		help(cmd, args)
	})
	root.InitDefaultCompletionCmd()
	refuseArguments(root)
	return root
}

// refuseArguments makes a command that only has subcommands refuse any other argument, and one that
// says nothing of arguments refuse them all. So do the subcommands of cobra's completion command,
// whose own error quotes the argument.
func refuseArguments(c *cobra.Command) {
	for _, sub := range c.Commands() {
		if c.Name() == "completion" {
			sub.Args = nil
		}
		refuseArguments(sub)
	}
	switch {
	case c.HasSubCommands() && !c.Runnable():
		c.Args, c.RunE, c.SuggestionsMinimumDistance = oneOf, showHelp, 2
	case c.Args == nil:
		c.Args = cli.NoArgs
	}
}

// newConnection is a topic of the help: flags that every command has, and few need.
func newConnection() *cobra.Command {
	return &cobra.Command{
		Use:   "connection",
		Short: "TLS, passwords and tokens of the connections to PostgreSQL and Kafka",
		Long: `Every command has these flags, too. TLS to PostgreSQL and its client certificate are parts of --database-url, or PG...
variables: sslmode, sslrootcert, sslcert, sslkey.

` + strings.TrimRight(cli.ConnectionFlags().FlagUsages(), "\n"),
	}
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Show the flags of a command",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return errors.New("help: no such command: see outbox-relay --help")
			}
			return found.Help()
		},
	}
}

// showHelp runs when a command that only has subcommands is called without one.
func showHelp(cmd *cobra.Command, _ []string) error {
	cmd.SetOut(cmd.ErrOrStderr())
	if err := cmd.Help(); err != nil {
		return err
	}
	return usageError{fmt.Errorf("%s: a command is missing", cmd.CommandPath())}
}

// oneOf refuses an unknown subcommand.
func oneOf(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	near := cmd.SuggestionsFor(args[0]) // "" is the beginning of every name
	if len(near) > 0 && args[0] != "" {
		return fmt.Errorf("unknown command %s: did you mean %q?", cli.Shown(args[0]), near[0])
	}
	return fmt.Errorf("unknown command %s: see %s --help", cli.Shown(args[0]), cmd.CommandPath())
}

// flagError replaces errors of the flag parser that may quote a secret, such as -database-url=...
// with one dash.
func flagError(cmd *cobra.Command, err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		return err
	}
	see := "see " + cmd.CommandPath() + " --help"
	var unknown *pflag.NotExistError
	var noValue *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() != "":
		return fmt.Errorf("unknown flag -%s: flags begin with two dashes: %s", unknown.GetSpecifiedName(), see)
	case errors.As(err, &unknown):
		return fmt.Errorf("unknown flag --%s: %s", unknown.GetSpecifiedName(), see)
	case errors.As(err, &noValue):
		return fmt.Errorf("flag --%s needs a value: %s", noValue.GetSpecifiedName(), see)
	case errors.As(err, &invalid):
		return fmt.Errorf("--%s %s: %w", invalid.GetFlag().Name, cli.Shown(invalid.GetValue()), invalid.Unwrap())
	}
	return errors.New("the flags cannot be parsed: " + see)
}

// versionInfo is what "version --json" prints.
type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision"` // of the source; empty if the build does not record it
	Modified bool   `json:"modified"` // the source had uncommitted changes
	Schema   int    `json:"schema_version"`
	Go       string `json:"go"`
}

func newVersion(s *cli.Settings) *cobra.Command {
	cmd := cli.Offline(&cobra.Command{
		Use:   "version",
		Short: "Print the versions of program, schema and Go",
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := readVersion()
			revision := cmp.Or(v.Revision, "unknown")
			if v.Modified {
				revision += " with changes"
			}
			return say(cmd.OutOrStdout(), s.JSON, v, "outbox-relay %s\nrevision %s\nschema   version %d\ngo       %s\n",
				v.Version, revision, v.Schema, v.Go)
		},
	})
	s.AddJSON(cmd)
	return cmd
}

func readVersion() versionInfo {
	v := versionInfo{Version: "unknown"}
	if all, err := migrations.All(migrations.Options{}); err == nil {
		v.Schema = len(all)
	}
	info, found := debug.ReadBuildInfo()
	if !found {
		return v
	}
	v.Go = info.GoVersion
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			v.Revision = setting.Value
		case "vcs.modified":
			v.Modified = setting.Value == "true"
		}
	}
	return v
}
