package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	saslplain "github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// Mechanisms of SASL, as the flag has them.
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

// kafkaSecurity says how the brokers are known to us, and we to them.
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
	addBool(flags, &k.tls, "kafka-tls", "talk to the brokers over TLS 1.2 or later")
	addOption(flags, "kafka-ca-file", "file", "", "authorities that sign the brokers' certificates, in PEM form, in place of the system's", k.parseAuthorities)
	addFile(flags, &k.certFile, "kafka-cert-file", "certificate to show to the brokers, in PEM form; read again for each connection")
	addFile(flags, &k.keyFile, "kafka-key-file", "its key, in PEM form; read again for each connection")
	addChoice(flags, &k.mechanism, "kafka-sasl-mechanism", []string{mechanismPlain, mechanismScramSHA256, mechanismScramSHA512, mechanismOAuth}, "",
		"how to authenticate to the brokers")
	addOption(flags, "kafka-username", "string", "", "user of plain and scram", func(text string) error {
		if text == "" || len(text) > 1024 || strings.ContainsAny(text, "\x00\x01\r\n") {
			return errors.New("want 1 to 1024 bytes of one line")
		}
		k.username = text
		return nil
	})
	addOption(flags, flagKafkaPasswordFile, "file", "", "file with the password of that user; read again at each authentication", k.password.parse)
	addOption(flags, flagKafkaTokenFile, "file", "", "file with the token of oauthbearer; read again at each authentication", k.token.parse)
}

// addFile adds a flag of a file that is used later, and has to be there now.
func addFile(flags *pflag.FlagSet, target *string, name, usage string) {
	addOption(flags, name, "file", "", usage, func(path string) error {
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

// used tells whether anything but the plain protocol was asked for.
func (k *kafkaSecurity) used() bool { return k.tls || k.mechanism != "" }

// bares tells whether what authenticates us goes over the connection as it is.
func (k *kafkaSecurity) bares() bool {
	return !k.tls && (k.mechanism == mechanismPlain || k.mechanism == mechanismOAuth)
}

// check returns every contradiction.
func (k *kafkaSecurity) check(brokers []string, insecure bool) error {
	token, named := k.mechanism == mechanismOAuth, k.mechanism != "" && k.mechanism != mechanismOAuth
	var problems []error
	for _, c := range []struct {
		wrong bool
		text  string
	}{
		{!k.tls && k.caFile+k.certFile+k.keyFile != "", "--kafka-ca-file, --kafka-cert-file and --kafka-key-file are of TLS: want --kafka-tls too"},
		{k.certFile != "" && k.keyFile == "", "--kafka-cert-file without its key: want --kafka-key-file too"},
		{k.keyFile != "" && k.certFile == "", "--kafka-key-file without its certificate: want --kafka-cert-file too"},
		{k.mechanism == "" && (k.username != "" || k.password.given() || k.token.given()), "who authenticates to the brokers, but not how: want --kafka-sasl-mechanism too"},
		{named && k.username == "", "--kafka-sasl-mechanism " + k.mechanism + ": want --kafka-username too"},
		{named && !k.password.given(), "--kafka-sasl-mechanism " + k.mechanism + ": want --" + flagKafkaPasswordFile + " too"},
		{named && k.token.given(), "--" + flagKafkaTokenFile + ": want --kafka-sasl-mechanism " + mechanismOAuth + ", which alone takes a token"},
		{token && !k.token.given(), "--kafka-sasl-mechanism " + mechanismOAuth + ": want --" + flagKafkaTokenFile + " too"},
		{token && (k.username != "" || k.password.given()), "--kafka-sasl-mechanism " + mechanismOAuth + " takes a token: want no --kafka-username and no --" + flagKafkaPasswordFile},
		{k.bares() && !insecure && !allLoopback(brokers), "--kafka-sasl-mechanism " + k.mechanism + " without TLS to another machine shows the secret to whoever is on the network between: want --kafka-tls; --insecure if you trust that network"},
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

// checkCertificate says nothing of files that could not be read: that was said already.
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

// options are for every client. limit is how long it may take to connect.
func (k *kafkaSecurity) options(insecure bool, limit time.Duration) (opts []kgo.Opt) {
	dialer := &net.Dialer{Timeout: limit}
	switch {
	case k.tls:
		opts = append(opts, kgo.DialTimeout(limit), kgo.DialTLSConfig(k.tlsConfig()))
	case k.bares() && !insecure:
		// The brokers name each other: one on this machine may lead to others.
		opts = append(opts, kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
			if !allLoopback([]string{address}) {
				return nil, fmt.Errorf("broker %s is on another machine, and %s without TLS would show it the secret: want --kafka-tls, or --insecure", address, k.mechanism)
			}
			return dialer.DialContext(ctx, network, address)
		}))
	default:
		opts = append(opts, kgo.DialTimeout(limit))
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

// allLoopback tells whether addresses, as host:port, are all of this machine.
func allLoopback(addresses []string) bool {
	return !slices.ContainsFunc(addresses, func(address string) bool {
		host, _, err := net.SplitHostPort(address)
		return err != nil || !isLoopback(host)
	})
}

func isLoopback(host string) bool {
	return strings.EqualFold(host, "localhost") || net.ParseIP(host).IsLoopback()
}
