package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes.
const (
	exitDone    = 0
	exitNotWell = 1
	exitUsage   = 2
)

// usageError is wrong use that shows only when a command works.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// errNotWell ends a command that has already said, on stdout, what is not well.
var errNotWell = errors.New("not well")

// commands are the constructors of all commands. The settings are filled in before a command works.
func commands() []func(*settings) *cobra.Command {
	return []func(*settings) *cobra.Command{
		newRun, newMigrate, newStatus, newPositions, newExplain, newVerify, newTail, newReplay, newDead, newTopics, newShards, newRelays, newRepair, newConsumer, newParked, newKeys, newActions,
		newDoctor, newPrune, newDemo,
		newBench, newVersion,
	}
}

// execute runs one command line and returns the exit code. Everything it needs of the process comes as
// an argument, so that tests run commands beside each other.
func execute(ctx context.Context, args []string, lookup lookupFunc, stdout, stderr io.Writer) int {
	s := &settings{lookup: lookup, checks: map[*cobra.Command]func() error{}}
	root := newRoot(s, stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, errNotWell):
		return exitNotWell
	case ctx.Err() != nil:
		_, _ = io.WriteString(stderr, "error: interrupted\n")
		return exitNotWell
	}
	var denied *pgconn.PgError
	if errors.As(err, &denied) && denied.Code == "42501" {
		err = fmt.Errorf("%w: \"outbox-relay doctor\" lists the rights that the role lacks", err)
	}
	text := "error: " + strings.ReplaceAll(err.Error(), "\n", "\nerror: ") + "\n"
	_, _ = io.WriteString(stderr, text) // if even that fails, the exit status has to say it
	// What fails before a command works is a matter of how it was called.
	if errors.As(err, &usageError{}) || !s.resolved {
		return exitUsage
	}
	return exitNotWell
}

// newRoot returns the command tree.
func newRoot(s *settings, stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "outbox-relay",
		Short: "Publish the outbox table to Kafka, and look after it",
		Long: `outbox-relay publishes the rows of the outbox table to Kafka, in order for each key,
and is the operator's tool for the pipeline.

Every flag has an environment variable: OUTBOX_ and its name in upper case, so
--database-url is OUTBOX_DATABASE_URL. DATABASE_URL and KAFKA_BROKERS are understood too.
A flag wins over OUTBOX_..., and that wins over the general name.

Exit status: 0 done, 1 what was asked about is not well or failed, 2 wrong use.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(flagError)
	s.addFlags(root.PersistentFlags())
	for _, build := range commands() {
		c := build(s)
		c.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return s.resolve(cmd) }
		root.AddCommand(c)
	}
	root.SetHelpCommand(newHelp())
	root.InitDefaultCompletionCmd()
	nameOnly(root)
	return root
}

// nameOnly makes commands that only have subcommands refuse what is none of them. The shells of cobra's
// own completion command get our words for a needless argument: cobra's quote it.
func nameOnly(c *cobra.Command) {
	for _, sub := range c.Commands() {
		if c.Name() == "completion" {
			sub.Args = noArgs
		}
		nameOnly(sub)
	}
	if c.HasSubCommands() && !c.Runnable() {
		c.Args, c.RunE, c.SuggestionsMinimumDistance = oneOf, showHelp, 2
	}
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [command]",
		Short: "Show the flags of a command",
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return errors.New("help: no such command: see outbox-relay --help")
			}
			return found.Help()
		},
	}
}

// showHelp is the work of a command that only has subcommands: called alone, it did nothing.
func showHelp(cmd *cobra.Command, _ []string) error {
	cmd.SetOut(cmd.ErrOrStderr())
	if err := cmd.Help(); err != nil {
		return err
	}
	return usageError{fmt.Errorf("%s: a command is missing", cmd.CommandPath())}
}

// oneOf refuses an argument of a command that only has subcommands.
func oneOf(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	near := cmd.SuggestionsFor(args[0])
	if len(near) > 0 {
		return fmt.Errorf("unknown command %s: did you mean %q?", shown(args[0]), near[0])
	}
	return fmt.Errorf("unknown command %s: see %s --help", shown(args[0]), cmd.CommandPath())
}

// noArgs refuses every argument. An argument is never quoted as it is: it may be a database URL.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes no argument, got %s: see %s --help", cmd.CommandPath(), shown(args[0]), cmd.CommandPath())
	}
	return nil
}

// flagError replaces the texts of the flag parser where they quote what might be a secret, such as
// -database-url=... with one dash.
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
		return fmt.Errorf("--%s %s: %w", invalid.GetFlag().Name, shown(invalid.GetValue()), invalid.Unwrap())
	}
	return errors.New("the flags cannot be parsed: " + see)
}
