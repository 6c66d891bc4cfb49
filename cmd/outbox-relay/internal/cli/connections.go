package cli

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Annotations of commands: see AsksKafka and PlainKafka.
const (
	annotationAsksKafka  = "asks-kafka"
	annotationPlainKafka = "plain-kafka"
)

const flagDatabasePasswordFile = "database-password-file"

// AsksKafka marks a command that connects to brokers, if it is given some. For all other commands
// it does not matter where the brokers are.
func AsksKafka(cmd *cobra.Command) *cobra.Command {
	return annotate(cmd, annotationAsksKafka, "true")
}

// PlainKafka marks a command that starts its own Kafka, or uses one of a test bench. It supports
// neither TLS nor SASL.
func PlainKafka(cmd *cobra.Command) *cobra.Command {
	return annotate(AsksKafka(cmd), annotationPlainKafka, "true")
}

// isConnection reports whether a flag configures the connection to the database or to the brokers.
func isConnection(flag string) bool {
	return isAddress(flag) || flag == flagDatabasePasswordFile || strings.HasPrefix(flag, "kafka-")
}

// ConnectionFlags are the flags of connections that few command lines need.
func ConnectionFlags() *pflag.FlagSet {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	(&Settings{}).addConnectionFlags(flags)
	return flags
}

func (s *Settings) addConnectionFlags(flags *pflag.FlagSet) {
	s.databasePassword.flag = flagDatabasePasswordFile
	AddOption(flags, flagDatabasePasswordFile, "file", "", "file with the database password; wins over the URL's; read again for each connection", s.databasePassword.parse)
	s.kafka.addFlags(flags)
}

// checkConnections returns all conflicts between connection flags.
func (s *Settings) checkConnections(cmd *cobra.Command) error {
	problem := errors.Join(s.kafka.check(), s.checkPlaintext(cmd))
	if s.pool != nil && !s.insecure {
		if host, mode := weakest(s.pool.ConnConfig); mode == sslDisable {
			problem = errors.Join(problem, fmt.Errorf("--%s: sslmode=disable to %s, which is another machine, exposes data on the network: "+
				"want sslmode=verify-full; --insecure if you trust that network", FlagDatabaseURL, host))
		}
	}
	if cmd.Annotations[annotationPlainKafka] != "" && len(s.Brokers) > 0 && s.kafka.used() {
		problem = errors.Join(problem, fmt.Errorf("%s supports neither TLS nor SASL: want --brokers without them, or none", cmd.CommandPath()))
	}
	if cmd.Annotations[annotationPlainKafka] != "" && s.databasePassword.given() {
		problem = errors.Join(problem, fmt.Errorf("%s takes no --%s: want the password in the database URL", cmd.CommandPath(), flagDatabasePasswordFile))
	}
	return problem
}

// ChildCommand returns the command line of a child process of this command. The child reads the
// same environment and gets --insecure if this process has it.
func (s *Settings) ChildCommand(words ...string) []string {
	if s.insecure {
		words = append(words, "--insecure")
	}
	return words
}

// checkPlaintext refuses unencrypted brokers on other machines. The brokers that those name, and
// the addresses of host names, are checked when they are dialed: see dialThisMachine.
func (s *Settings) checkPlaintext(cmd *cobra.Command) error {
	broker := elsewhere(s.Brokers)
	if cmd.Annotations[annotationAsksKafka] == "" || broker == "" || s.kafka.tls || s.insecure {
		return nil
	}
	remedy := plaintextRemedy
	if cmd.Annotations[annotationPlainKafka] != "" {
		remedy = insecureTrusts
	}
	return fmt.Errorf("--%s: %s is another machine, and %s%s", FlagBrokers, broker, plaintextShows, remedy)
}

// warn logs which connection is less safe than it could be, unless --insecure is given.
func (s *Settings) warn(cmd *cobra.Command) {
	if s.insecure || cmd.Annotations[annotationOffline] != "" {
		return
	}
	if s.pool != nil {
		if host, mode := weakest(s.pool.ConnConfig); mode != sslVerifyFull {
			s.Logger(cmd.ErrOrStderr()).Warn("the database's identity is not verified, so a machine on the network can pose as it: set sslmode=verify-full and, for an authority of your own, "+
				"sslrootcert=FILE in the database URL; --insecure if you trust that network", "host", host, "sslmode", string(mode))
		}
	}
}

// sslMode is the protection that a connection has, named like the value of the parameter sslmode.
type sslMode string

const (
	sslDisable    sslMode = "disable"
	sslPrefer     sslMode = "prefer" // or allow: see encryptedOnly
	sslRequire    sslMode = "require"
	sslVerifyCA   sslMode = "verify-ca"
	sslVerifyFull sslMode = "verify-full"
)

// weakest returns the host with the least safe connection. This machine and its sockets are safe.
func weakest(c *pgx.ConnConfig) (host string, mode sslMode) {
	order := []sslMode{sslDisable, sslPrefer, sslRequire, sslVerifyCA, sslVerifyFull}
	mode = sslVerifyFull
	for _, h := range hosts(c) {
		var ways []*tls.Config
		for _, attempt := range hosts(c) {
			if attempt.Host == h.Host {
				ways = append(ways, attempt.TLSConfig)
			}
		}
		if m := modeOf(ways); !isLocal(h) && slices.Index(order, m) < slices.Index(order, mode) {
			host, mode = h.Host, m
		}
	}
	return host, mode
}

// modeOf derives the mode from the TLS settings with which a host is tried.
func modeOf(ways []*tls.Config) sslMode {
	encrypted := slices.IndexFunc(ways, func(c *tls.Config) bool { return c != nil })
	switch {
	case encrypted < 0:
		return sslDisable
	case slices.Contains(ways, nil):
		return sslPrefer
	case !ways[encrypted].InsecureSkipVerify:
		return sslVerifyFull
	case ways[encrypted].VerifyPeerCertificate != nil:
		return sslVerifyCA
	}
	return sslRequire
}

// encryptedOnly removes unencrypted attempts to other machines. With sslmode=prefer or allow, a
// machine on the network could otherwise force one by answering that there is no TLS.
func encryptedOnly(c *pgx.ConnConfig) {
	kept := slices.DeleteFunc(hosts(c), func(h *pgconn.FallbackConfig) bool { return h.TLSConfig == nil && !isLocal(h) })
	if len(kept) > 0 {
		c.Host, c.Port, c.TLSConfig, c.Fallbacks = kept[0].Host, kept[0].Port, kept[0].TLSConfig, kept[1:]
	}
}

// isLocal reports whether a connection stays on this machine.
func isLocal(h *pgconn.FallbackConfig) bool {
	network, _ := pgconn.NetworkAddress(h.Host, h.Port)
	return network == "unix" || isLoopback(h.Host)
}

// usePassword reads the password file and puts its password into a connection about to be made.
func (s *Settings) usePassword(_ context.Context, config *pgx.ConnConfig) error {
	if !s.databasePassword.given() {
		return nil
	}
	password, err := s.databasePassword.read()
	if err != nil {
		return err
	}
	config.Password = password
	return nil
}

// DatabaseAddress returns the URL, for code that only takes one, or an empty text. It is a secret: print Target.
func (s *Settings) DatabaseAddress() string {
	if s.pool == nil {
		return ""
	}
	return s.pool.ConnString()
}

// settingsFileBytesMax is far above any password, token, key or list of authorities.
const settingsFileBytesMax = 4 << 20

// readSettingsFile reads a file that a flag names. Its errors quote neither the file nor its name:
// the user may have given the secret instead of the name.
func readSettingsFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errors.New("want a file that exists")
	case errors.Is(err, fs.ErrPermission):
		return nil, errors.New("want a file that this user may read")
	case err != nil:
		return nil, errors.New("want a file that can be read")
	case !info.Mode().IsRegular():
		// A pipe would be empty for the next connection.
		return nil, errors.New("want a regular file: it is read again later")
	}
	file, err := os.Open(path) //nolint:gosec // the operator names it
	if err != nil {
		return nil, errors.New("want a file that this user may read")
	}
	defer func() { _ = file.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(file, settingsFileBytesMax+1))
	switch {
	case err != nil:
		return nil, errors.New("want a file that can be read")
	case len(text) > settingsFileBytesMax:
		return nil, fmt.Errorf("want a file of at most %d bytes", settingsFileBytesMax)
	case len(bytes.TrimSpace(text)) == 0:
		return nil, errors.New("the file is empty")
	}
	return text, nil
}

// secretFile names a file with one line: a password or a token. It is read for each use, so a new
// secret needs no restart. The zero value names none.
type secretFile struct {
	flag string
	path string
}

func (f *secretFile) given() bool { return f.path != "" }

// parse reads the file once, so that an invalid one is refused at the start.
func (f *secretFile) parse(path string) error {
	f.path = path
	_, err := f.content()
	return err
}

// errSecretFile identifies these errors to code that must not repeat the driver's errors.
var errSecretFile = errors.New("the secret cannot be read")

// read returns the secret as it is now.
func (f *secretFile) read() (string, error) {
	text, err := f.content()
	if err != nil {
		return "", fmt.Errorf("%w: --%s: %w", errSecretFile, f.flag, err)
	}
	return text, nil
}

func (f *secretFile) content() (string, error) {
	text, err := readSettingsFile(f.path)
	if err != nil {
		return "", err
	}
	text = bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))
	// PLAIN and OAUTHBEARER separate their fields with bytes 0 and 1.
	if bytes.ContainsAny(text, "\r\n\x00\x01") {
		return "", errors.New("want a file of one line of text")
	}
	return string(text), nil
}
