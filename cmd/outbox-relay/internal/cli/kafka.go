package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	saslplain "github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// BrokersMax is how long a connection to a broker may take, and how long a start waits for one
// before it logs that none answers.
const BrokersMax = 5 * time.Second

// KafkaOptions returns the client options to connect to the brokers.
func (s *Settings) KafkaOptions(logger *slog.Logger) []kgo.Opt {
	return append(s.kafka.options(s.insecure, BrokersMax), kgo.SeedBrokers(s.Brokers...), kgo.WithLogger(kafkaLog{logger}))
}

// KafkaClient returns a client for queries. It gives up after limit, and returns a request's error
// instead of retrying.
func (s *Settings) KafkaClient(limit time.Duration) (*kgo.Client, error) {
	return kgo.NewClient(append(s.kafka.options(s.insecure, limit), kgo.SeedBrokers(s.Brokers...), kgo.RetryTimeout(limit),
		kgo.RequestRetries(0), kgo.SoftwareNameAndVersion("outbox-relay", "v1"))...)
}

// AskKafka runs work with a client for queries, within a time limit.
func (s *Settings) AskKafka(ctx context.Context, limit time.Duration, work func(context.Context, *kgo.Client) error) error {
	client, err := s.KafkaClient(limit)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return work(ctx, client)
}

// kafkaLog forwards the client's log, above all that brokers are unreachable.
type kafkaLog struct{ logger *slog.Logger }

func (l kafkaLog) Level() kgo.LogLevel {
	if l.logger.Enabled(context.Background(), slog.LevelDebug) { //nolint:forbidigo // kgo.Logger has no context
		return kgo.LogLevelDebug
	}
	return kgo.LogLevelWarn
}

func (l kafkaLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	at := slog.LevelDebug
	switch level { //nolint:exhaustive // None is never logged, Debug is the value above
	case kgo.LogLevelError:
		at = slog.LevelError
	case kgo.LogLevelWarn:
		at = slog.LevelWarn
	case kgo.LogLevelInfo:
		at = slog.LevelInfo
	}
	l.logger.Log(context.Background(), at, "kafka: "+msg, keyvals...) //nolint:forbidigo // kgo.Logger has no context
}

// SASL mechanisms, as the flag spells them.
const (
	mechanismPlain       = "plain"
	mechanismScramSHA256 = "scram-sha-256"
	mechanismScramSHA512 = "scram-sha-512"
	mechanismOAuth       = "oauthbearer"
)

const (
	flagKafkaPasswordFile = "kafka-password-file"
	flagKafkaTokenFile    = "kafka-token-file"
)

// kafkaSecurity configures TLS, and authentication to the brokers.
type kafkaSecurity struct {
	tls         bool
	caFile      string
	authorities *x509.CertPool // nil: the system's
	certFile    string
	keyFile     string
	mechanism   string // empty: none
	username    string
	password    secretFile
	token       secretFile
}

func (k *kafkaSecurity) addFlags(flags *pflag.FlagSet) {
	k.password.flag, k.token.flag = flagKafkaPasswordFile, flagKafkaTokenFile
	AddBool(flags, &k.tls, "kafka-tls", "connect to the brokers over TLS 1.2 or later")
	AddOption(flags, "kafka-ca-file", "file", "", "PEM file of the authorities that sign the brokers' certificates; default: the system's", k.parseAuthorities)
	addFile(flags, &k.certFile, "kafka-cert-file", "PEM file of the client certificate; read again for each connection")
	addFile(flags, &k.keyFile, "kafka-key-file", "PEM file of its key; read again for each connection")
	AddChoice(flags, &k.mechanism, "kafka-sasl-mechanism", []string{mechanismPlain, mechanismScramSHA256, mechanismScramSHA512, mechanismOAuth}, "",
		"how to authenticate to the brokers")
	AddOption(flags, "kafka-username", "string", "", "user for plain and scram", func(text string) error {
		if text == "" || len(text) > 1024 || strings.ContainsAny(text, "\x00\x01\r\n") {
			return errors.New("want 1 to 1024 bytes of one line")
		}
		k.username = text
		return nil
	})
	AddOption(flags, flagKafkaPasswordFile, "file", "", "file with that user's password; read again at each authentication", k.password.parse)
	AddOption(flags, flagKafkaTokenFile, "file", "", "file with the token for oauthbearer; read again at each authentication", k.token.parse)
}

// addFile adds a flag of a file that is used later, but must be readable now.
func addFile(flags *pflag.FlagSet, target *string, name, usage string) {
	AddOption(flags, name, "file", "", usage, func(path string) error {
		*target = path
		_, err := readSettingsFile(path)
		return err
	})
}

func (k *kafkaSecurity) parseAuthorities(path string) error {
	k.caFile = path
	text, err := readSettingsFile(path)
	if err != nil {
		return err
	}
	k.authorities = x509.NewCertPool()
	if !k.authorities.AppendCertsFromPEM(text) {
		return errors.New("want certificates in PEM form")
	}
	return nil
}

// used reports whether TLS or SASL is configured.
func (k *kafkaSecurity) used() bool { return k.tls || k.mechanism != "" }

// check returns all conflicts between the flags.
func (k *kafkaSecurity) check() error {
	token, named := k.mechanism == mechanismOAuth, k.mechanism != "" && k.mechanism != mechanismOAuth
	var problems []error
	for _, c := range []struct {
		wrong bool
		text  string
	}{
		{!k.tls && k.caFile+k.certFile+k.keyFile != "", "--kafka-ca-file, --kafka-cert-file and --kafka-key-file are for TLS: want --kafka-tls too"},
		{k.certFile != "" && k.keyFile == "", "--kafka-cert-file without its key: want --kafka-key-file too"},
		{k.keyFile != "" && k.certFile == "", "--kafka-key-file without its certificate: want --kafka-cert-file too"},
		{k.mechanism == "" && (k.username != "" || k.password.given() || k.token.given()), "credentials for the brokers without a mechanism: want --kafka-sasl-mechanism too"},
		{named && k.username == "", "--kafka-sasl-mechanism " + k.mechanism + ": want --kafka-username too"},
		{named && !k.password.given(), "--kafka-sasl-mechanism " + k.mechanism + ": want --" + flagKafkaPasswordFile + " too"},
		{named && k.token.given(), "--" + flagKafkaTokenFile + ": only --kafka-sasl-mechanism " + mechanismOAuth + " takes a token"},
		{token && !k.token.given(), "--kafka-sasl-mechanism " + mechanismOAuth + ": want --" + flagKafkaTokenFile + " too"},
		{token && (k.username != "" || k.password.given()), "--kafka-sasl-mechanism " + mechanismOAuth + " takes a token: want no --kafka-username and no --" + flagKafkaPasswordFile},
	} {
		if c.wrong {
			problems = append(problems, errors.New(c.text))
		}
	}
	if k.certFile != "" && k.keyFile != "" {
		problems = append(problems, k.checkCertificate())
	}
	return errors.Join(problems...)
}

// checkCertificate ignores files that could not be read: their flags already reported that.
func (k *kafkaSecurity) checkCertificate() error {
	certificate, certErr := readSettingsFile(k.certFile)
	key, keyErr := readSettingsFile(k.keyFile)
	if certErr != nil || keyErr != nil {
		return nil //nolint:nilerr // see above
	}
	if _, err := tls.X509KeyPair(certificate, key); err != nil {
		return fmt.Errorf("--kafka-cert-file and --kafka-key-file: want a certificate and its key in PEM form: %w", err)
	}
	return nil
}

// options returns the options of every client. limit bounds a connection attempt.
func (k *kafkaSecurity) options(insecure bool, limit time.Duration) (opts []kgo.Opt) {
	switch {
	case k.tls:
		opts = append(opts, kgo.DialTimeout(limit), kgo.DialTLSConfig(k.tlsConfig()))
	case insecure:
		opts = append(opts, kgo.DialTimeout(limit))
	default:
		opts = append(opts, kgo.Dialer(dialThisMachine(&net.Dialer{Timeout: limit})))
	}
	if k.mechanism != "" {
		opts = append(opts, kgo.SASL(k.sasl()))
	}
	return opts
}

func (k *kafkaSecurity) tlsConfig() *tls.Config {
	config := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: k.authorities}
	if k.certFile != "" {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(k.certFile, k.keyFile)
			if err != nil {
				return nil, fmt.Errorf("--kafka-cert-file and --kafka-key-file: %w", err)
			}
			return &pair, nil
		}
	}
	return config
}

func (k *kafkaSecurity) sasl() sasl.Mechanism {
	credentials := func(context.Context) (scram.Auth, error) {
		password, err := k.password.read()
		return scram.Auth{User: k.username, Pass: password}, err
	}
	switch k.mechanism {
	case mechanismPlain:
		return saslplain.Plain(func(context.Context) (saslplain.Auth, error) {
			password, err := k.password.read()
			return saslplain.Auth{User: k.username, Pass: password}, err
		})
	case mechanismScramSHA256:
		return scram.Sha256(credentials)
	case mechanismScramSHA512:
		return scram.Sha512(credentials)
	default:
		return oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			token, err := k.token.read()
			return oauth.Auth{Token: token}, err
		})
	}
}

// dialThisMachine only connects to this machine. A broker on this machine may name brokers on
// others, and a host name, "localhost" too, may resolve to any address. So each address is checked
// once it is resolved, before a byte is sent.
func dialThisMachine(base *net.Dialer) func(ctx context.Context, network, broker string) (net.Conn, error) {
	return func(ctx context.Context, network, broker string) (net.Conn, error) {
		dialer := *base
		dialer.ControlContext = func(_ context.Context, _, address string, _ syscall.RawConn) error {
			if elsewhere([]string{address}) != "" {
				return fmt.Errorf("broker %s, at %s, is on another machine, and %s%s", broker, address, plaintextShows, plaintextRemedy)
			}
			return nil
		}
		return dialer.DialContext(ctx, network, broker)
	}
}

const (
	plaintextShows  = "without TLS the traffic to it, secrets too, can be read and changed on the network: want "
	insecureTrusts  = "--insecure if you trust that network"
	plaintextRemedy = "--kafka-tls; " + insecureTrusts
)

// elsewhere returns the first address, as host:port, that is not on this machine, or an empty
// string.
func elsewhere(addresses []string) string {
	for _, address := range addresses {
		if host, _, err := net.SplitHostPort(address); err != nil || !isLoopback(host) {
			return address
		}
	}
	return ""
}

func isLoopback(host string) bool {
	return strings.EqualFold(host, "localhost") || net.ParseIP(host).IsLoopback()
}
