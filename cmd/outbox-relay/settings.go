package main

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

// lookupFunc is os.LookupEnv, or a test's replacement.
type lookupFunc func(name string) (value string, found bool)

// secret is a text that never appears in formatted output. A function holds it, because fmt prints
// a struct inside another struct without calling its methods.
type secret struct{ text func() string }

const hidden = "(hidden)"

func (s secret) String() string       { return hidden }
func (s secret) GoString() string     { return hidden }
func (s secret) LogValue() slog.Value { return slog.StringValue(hidden) }

func (s secret) reveal() string {
	if s.text == nil {
		return ""
	}
	return s.text()
}

// settings are the flags that every command has. They are complete when a command runs.
type settings struct {
	databaseURL      secret // empty: not given
	databasePassword secretFile
	pool             *pgxpool.Config // parsed from databaseURL; nil: not given
	brokers          []string        // host:port; empty: not given
	kafka            kafkaSecurity
	insecure         bool
	schema           string
	relay            string
	logLevel         slog.Level
	logFormat        string

	lookup   lookupFunc
	checks   map[*cobra.Command][]func() error // of flags that depend on each other
	resolved bool                              // a command was found, and its flags are valid
}

// newSettings returns settings that read the environment through lookup.
func newSettings(lookup lookupFunc) *settings {
	return &settings{lookup: lookup, checks: map[*cobra.Command][]func() error{}}
}

// check makes a command call problems once its flags are parsed. What that returns is reported
// together with invalid flags.
func (s *settings) check(cmd *cobra.Command, problems func() error) {
	s.checks[cmd] = append(s.checks[cmd], problems)
}

// hasDatabase reports whether an address of a database is given.
func (s *settings) hasDatabase() bool { return s.pool != nil }

// Annotations of commands: see needs and offline.
const (
	annotationNeeds   = "needs"
	annotationOffline = "offline"
)

// annotationCommandLine marks flags that have no environment variable: see commandLineOnly.
const annotationCommandLine = "command-line"

const (
	flagDatabaseURL = "database-url"
	flagBrokers     = "brokers"
	// flagYes has no environment variable: consent belongs to one command line.
	flagYes = "yes"
)

// needs marks a command that requires these address flags.
func needs(cmd *cobra.Command, flags ...string) *cobra.Command {
	return annotate(cmd, annotationNeeds, strings.Join(flags, " "))
}

// offline marks a command that uses no address. It ignores an invalid one.
func offline(cmd *cobra.Command) *cobra.Command { return annotate(cmd, annotationOffline, "true") }

func annotate(cmd *cobra.Command, name, value string) *cobra.Command {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[name] = value
	return cmd
}

func isAddress(flag string) bool { return flag == flagDatabaseURL || flag == flagBrokers }

// generalName returns the variable that other programs use as well.
func generalName(flag string) string {
	switch flag {
	case flagDatabaseURL:
		return "DATABASE_URL"
	case flagBrokers:
		return "KAFKA_BROKERS"
	}
	return ""
}

func (s *settings) addFlags(flags *pflag.FlagSet) {
	addOption(flags, flagDatabaseURL, "url", "", "PostgreSQL, as postgres://user:password@host:5432/dbname; set it in the environment to hide it from other users of the machine",
		s.parseDatabaseURL)
	addOption(flags, flagBrokers, "list", "", "Kafka seed brokers, as host:port,host:port", s.parseBrokers)
	s.addConnectionFlags(flags)
	addOption(flags, "schema", "string", migrations.DefaultSchema, "schema that holds the tables", func(text string) error {
		name, err := migrations.Options{Schema: text}.Resolve()
		if err != nil || text == "" {
			// Resolve's error quotes the name, which the caller already shows.
			return errors.New("want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_")
		}
		s.schema = name
		return nil
	})
	addOption(flags, "relay", "string", "default", "name of the relay; replicas that share the work use the same name", func(text string) error {
		if text == "" || len(text) > 255 || strings.ContainsRune(text, 0) {
			return errors.New("want 1 to 255 bytes")
		}
		s.relay = text
		return nil
	})
	addOption(flags, "log-level", "string", "info", "lowest level logged to stderr (debug, info, warn, error)", func(text string) error {
		if err := s.logLevel.UnmarshalText([]byte(text)); err != nil {
			return errors.New("want debug, info, warn or error")
		}
		return nil
	})
	addChoice(flags, &s.logFormat, "log-format", []string{"text", "json"}, "text", "log format")
}

// resolve reads flags that were not given from the environment, parses all values and returns all
// problems at once.
func (s *settings) resolve(cmd *cobra.Command) error {
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
	s.resolved = true
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

func (s *settings) resolveFlag(cmd *cobra.Command, f *pflag.Flag) error {
	source := "--" + f.Name
	text := f.Value.String()
	if !f.Changed {
		name, value := s.fromEnvironment(f)
		if name != "" {
			source, text = name, value
			if err := cmd.Flags().Set(f.Name, value); err != nil {
				// Another package's flag: its error quotes the value.
				return fmt.Errorf("%s %s: want a %s", source, shown(value), f.Value.Type())
			}
		}
	}
	o, ours := f.Value.(*option)
	if !ours || text == "" && (isAddress(f.Name) || !f.Changed) {
		return nil
	}
	if err := o.parse(text); err != nil {
		if f.Name == flagDatabaseURL {
			return fmt.Errorf("%s: %w", source, err)
		}
		return fmt.Errorf("%s %s: %w", source, shown(text), err)
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
func (s *settings) fromEnvironment(f *pflag.Flag) (name, value string) {
	if f.Name == flagYes || f.Hidden || f.Annotations[annotationCommandLine] != nil {
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

func (s *settings) parseDatabaseURL(text string) error {
	config, err := parseDatabaseURL(text)
	if err != nil {
		return err
	}
	s.databaseURL, s.pool = secret{func() string { return text }}, config
	return nil
}

func (s *settings) parseBrokers(text string) error {
	s.brokers = nil
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
		s.brokers = append(s.brokers, net.JoinHostPort(host, port))
	}
	return nil
}

// logger returns a logger with the format and level of the flags.
func (s *settings) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: s.logLevel}
	if s.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
