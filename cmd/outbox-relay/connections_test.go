package main_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
)

// authority signs certificates of a test.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	file        string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	a.certificate = &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "authority of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	text, _ := a.sign(t, a.certificate)
	block, _ := pem.Decode(text)
	parsed, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	a.certificate, a.file = parsed, file(t, string(text))
	return a
}

// sign returns a certificate and its key in PEM form. The first one signs itself.
func (a *authority) sign(t *testing.T, template *x509.Certificate) (certificate, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	if a.key == nil {
		a.key = private
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &private.PublicKey, a.key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(private)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}

// issue returns a certificate of this machine's address, for servers and clients.
func (a *authority) issue(t *testing.T, change func(*x509.Certificate)) (certificate, key []byte) {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "party of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	return a.sign(t, template)
}

func (a *authority) server(t *testing.T, change func(*x509.Certificate)) *tls.Config {
	t.Helper()
	pair, err := tls.X509KeyPair(a.issue(t, change))
	require.NoError(t, err)
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// file writes a file of the test's own.
func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	rewrite(t, path, text)
	return path
}

// rewrite replaces a file as a whole, as those do that rotate secrets.
func rewrite(t *testing.T, path, text string) {
	t.Helper()
	next := path + ".next"
	require.NoError(t, os.WriteFile(next, []byte(text), 0o600))
	require.NoError(t, os.Rename(next, path))
}

// gatekeeper is a broker that answers about credentials as Apache Kafka does, where kfake hangs up.
// It takes any mechanism.
func gatekeeper(t *testing.T, lifetime time.Duration, accept func(mechanism, credentials string) bool, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	fake := kafkatest.Fake(t, opts...)
	mechanism := make(chan string, 100)
	fake.ControlKey(int16(kmsg.SASLHandshake), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		mechanism <- request.(*kmsg.SASLHandshakeRequest).Mechanism
		return request.ResponseKind(), nil, true
	})
	fake.ControlKey(int16(kmsg.SASLAuthenticate), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		response := request.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		response.SessionLifetimeMillis = lifetime.Milliseconds()
		if !accept(<-mechanism, string(request.(*kmsg.SASLAuthenticateRequest).SASLAuthBytes)) {
			response.ErrorCode = kerr.SaslAuthenticationFailed.Code
		}
		return response, nil, true
	})
	return fake
}

// secured is the environment of commands at a cluster.
func secured(fake *kfake.Cluster, database string, more map[string]string) map[string]string {
	environment := map[string]string{"OUTBOX_DATABASE_URL": database, "OUTBOX_BROKERS": strings.Join(fake.ListenAddrs(), ",")}
	for name, value := range more {
		environment["OUTBOX_"+name] = value
	}
	return environment
}
