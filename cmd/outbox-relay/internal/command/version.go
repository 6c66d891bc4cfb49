package command

import (
	"cmp"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/migrations"
)

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
