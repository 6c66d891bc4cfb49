// Package cli is what the commands share and is no command: flags with bounds that are also read
// from the environment, and the connections to PostgreSQL and Kafka that they configure. All
// problems of a command line are reported at once, and nothing repeats a secret.
package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/migrations"
)

// Settings are the flags that every command has. They are complete when a command runs.
type Settings struct {
	Brokers []string // --brokers, as host:port; empty: not given
	Schema  string   // --schema, a valid name
	Relay   string   // --relay
	JSON    bool     // --json, of commands that have it

	databasePassword secretFile
	pool             *pgxpool.Config // of the database URL, behind a pointer: formatted settings do not show it; nil: not given
	kafka            kafkaSecurity
	insecure         bool
	logLevel         slog.Level
	logFormat        string

	lookup func(name string) (value string, found bool)
	checks map[*cobra.Command][]func() error // of flags that depend on each other
	parsed bool                              // a command was found, and its flags are valid
}

// NewSettings returns settings that read the environment through lookup: os.LookupEnv, or a test's
// replacement.
func NewSettings(lookup func(name string) (value string, found bool)) *Settings {
	return &Settings{lookup: lookup, checks: map[*cobra.Command][]func() error{}}
}

// Check makes a command call problems once its flags are parsed, for flags that depend on each
// other. What problems returns is reported together with invalid flags, and the command does not
// run. A problem that names a flag whose value is invalid is left out.
func (s *Settings) Check(cmd *cobra.Command, problems func() error) {
	s.checks[cmd] = append(s.checks[cmd], problems)
}

// Resolved reports whether a command was found and its flags are valid. Without that, the command
// line is wrong.
func (s *Settings) Resolved() bool { return s.parsed }

// HasDatabase reports whether an address of a database is given.
func (s *Settings) HasDatabase() bool { return s.pool != nil }

// Annotations of commands: see Needs and Offline.
const (
	annotationNeeds   = "needs"
	annotationOffline = "offline"
)

// annotationCommandLine marks flags that have no environment variable: see CommandLineOnly.
const annotationCommandLine = "command-line"

// Flags that commands name.
const (
	FlagDatabaseURL = "database-url"
	FlagBrokers     = "brokers"
	// FlagYes has no environment variable: consent belongs to one command line.
	FlagYes = "yes"
)

// Needs marks a command that requires these addresses, by FlagDatabaseURL and FlagBrokers.
func Needs(cmd *cobra.Command, flags ...string) *cobra.Command {
	return annotate(cmd, annotationNeeds, strings.Join(flags, " "))
}

// Offline marks a command that connects to nothing. It ignores flags of connections, invalid ones
// too.
func Offline(cmd *cobra.Command) *cobra.Command { return annotate(cmd, annotationOffline, "true") }

func annotate(cmd *cobra.Command, name, value string) *cobra.Command {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[name] = value
	return cmd
}

func isAddress(flag string) bool { return flag == FlagDatabaseURL || flag == FlagBrokers }

// generalName returns the variable that other programs use as well.
func generalName(flag string) string {
	switch flag {
	case FlagDatabaseURL:
		return "DATABASE_URL"
	case FlagBrokers:
		return "KAFKA_BROKERS"
	}
	return ""
}

// AddFlags adds the flags that every command has.
func (s *Settings) AddFlags(flags *pflag.FlagSet) {
	AddOption(flags, FlagDatabaseURL, "url", "", "PostgreSQL, as postgres://user:password@host:5432/dbname; set it in the environment to hide it from other users of the machine",
		s.parseDatabaseURL)
	AddOption(flags, FlagBrokers, "list", "", "Kafka seed brokers, as host:port,host:port; for TLS and passwords see \"outbox-relay help connection\"", s.parseBrokers)
	s.addConnectionFlags(flags)
	AddBool(flags, &s.insecure, "insecure", "allow secrets and data in the clear on the network: to brokers without --kafka-tls, to a database without TLS")
	AddOption(flags, "schema", "string", migrations.DefaultSchema, "schema that holds the tables", func(text string) error {
		name, err := migrations.Options{Schema: text}.Resolve()
		if err != nil || text == "" {
			// Resolve's error quotes the name, which the caller already shows.
			return errors.New("want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_")
		}
		s.Schema = name
		return nil
	})
	AddOption(flags, "relay", "string", "default", "name of the relay; replicas that share the work use the same name", func(text string) error {
		if text == "" || len(text) > 255 || strings.ContainsRune(text, 0) {
			return errors.New("want 1 to 255 bytes")
		}
		s.Relay = text
		return nil
	})
	AddOption(flags, "log-level", "string", "info", "lowest level logged to stderr (debug, info, warn, error)", func(text string) error {
		if err := s.logLevel.UnmarshalText([]byte(text)); err != nil {
			return errors.New("want debug, info, warn or error")
		}
		return nil
	})
	AddChoice(flags, &s.logFormat, "log-format", []string{"text", "json"}, "text", "log format")
}

// Resolve completes the settings before cmd runs. It reads flags that were not given from the
// environment, parses all values and returns all problems at once.
func (s *Settings) Resolve(cmd *cobra.Command) error {
	var problems []error
	var refused []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" {
			return
		}
		if isConnection(f.Name) && cmd.Annotations[annotationOffline] != "" {
			return
		}
		if err := s.resolveFlag(cmd, f); err != nil {
			problems, refused = append(problems, err), append(refused, "--"+f.Name)
		}
	})
	for name := range strings.FieldsSeq(cmd.Annotations[annotationNeeds]) {
		if cmd.Flags().Lookup(name).Value.String() == "" {
			problems = append(problems, fmt.Errorf("--%s is missing: give the flag, or set %s or %s", name, ownName(name), generalName(name)))
		}
	}
	if cmd.Annotations[annotationOffline] == "" {
		problems = append(problems, s.checkConnections(cmd))
	}
	for _, check := range s.checks[cmd] {
		problems = append(problems, without(check(), refused))
	}
	if err := errors.Join(problems...); err != nil {
		return err
	}
	s.parsed = true
	s.warn(cmd)
	if s.pool != nil && !s.insecure {
		encryptedOnly(s.pool.ConnConfig)
	}
	return nil
}

// without drops problems that name a flag whose value was refused. They only say that the flag is
// missing, or does not fit another one.
func without(err error, flags []string) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var rest []error
		for _, one := range joined.Unwrap() {
			rest = append(rest, without(one, flags))
		}
		return errors.Join(rest...)
	}
	if err != nil && slices.ContainsFunc(flags, func(name string) bool { return strings.Contains(err.Error(), name) }) {
		return nil
	}
	return err
}

func (s *Settings) resolveFlag(cmd *cobra.Command, f *pflag.Flag) error {
	source := "--" + f.Name
	text := f.Value.String()
	if !f.Changed {
		name, value := s.fromEnvironment(f)
		if name != "" {
			source, text = name, value
			if err := cmd.Flags().Set(f.Name, value); err != nil {
				// Another package's flag: its error quotes the value.
				return fmt.Errorf("%s %s: want a %s", source, Shown(value), f.Value.Type())
			}
		}
	}
	o, ours := f.Value.(*option)
	if !ours || text == "" && (isAddress(f.Name) || !f.Changed) {
		return nil
	}
	if err := o.parse(text); err != nil {
		if f.Name == FlagDatabaseURL {
			return fmt.Errorf("%s: %w", source, err)
		}
		return fmt.Errorf("%s %s: %w", source, Shown(text), err)
	}
	return nil
}

// ownName is the variable of a flag that only this program reads.
func ownName(flag string) string {
	return "OUTBOX_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fromEnvironment returns the variable that sets a flag, or no name. An empty variable sets
// nothing: that is what an unset one becomes in many deployment files. What asks for consent cannot
// be given beforehand, and hidden flags are between processes of this program.
func (s *Settings) fromEnvironment(f *pflag.Flag) (name, value string) {
	if f.Name == FlagYes || f.Hidden || f.Annotations[annotationCommandLine] != nil {
		return "", ""
	}
	for _, name := range []string{ownName(f.Name), generalName(f.Name)} {
		if name == "" {
			continue
		}
		if value, found := s.lookup(name); found && value != "" {
			return name, value
		}
	}
	return "", ""
}

func (s *Settings) parseDatabaseURL(text string) (err error) {
	s.pool, err = parseDatabaseURL(text)
	return err
}

func (s *Settings) parseBrokers(text string) error {
	s.Brokers = nil
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		host, port, err := net.SplitHostPort(item)
		if err != nil && !strings.Contains(item, ":") {
			host, port, err = item, "9092", nil
		}
		n, portErr := strconv.ParseUint(port, 10, 16)
		if err != nil || portErr != nil || n == 0 || host == "" || strings.ContainsAny(host, "/@ ") {
			return errors.New("want host:port, several separated by commas")
		}
		s.Brokers = append(s.Brokers, net.JoinHostPort(host, port))
	}
	return nil
}

// Logger returns a logger to w with the format and level of the flags.
func (s *Settings) Logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: s.logLevel}
	if s.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
