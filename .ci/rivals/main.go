// Command rivals drives this module, the textbook's way and Watermill through the same faults with the same seeds, and
// prints what package torture found, as a table in Markdown.
//
//	go -C .ci/rivals run . -for 1m -seeds 5
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"github.com/effectonce/effectonce/integration/torture"
)

func main() {
	log.SetFlags(0)
	lasts := flag.Duration("for", time.Minute, "how long each run has faults")
	seeds := flag.Uint64("seeds", 5, "how many runs, with the seeds from 1 on")
	embedded := flag.Bool("embedded", false, "use downloaded PostgreSQL and kfake, even if there is a Docker engine")
	only := flag.String("only", "", "run only this one")
	verbose := flag.Bool("log", false, "write the log of the runs to stderr")
	flag.Parse()
	opts := torture.Options{Duration: *lasts, Embedded: *embedded, Log: io.Discard}
	if *verbose {
		opts.Log = os.Stderr
	}
	fmt.Println("| | runs | effects | faults | lost, or missing for a minute | doubled | out of order | per million effects and hundred faults |\n|---|---|---|---|---|---|---|---|")
	for _, rival := range []struct {
		name string
		torture.Rival
	}{{"effectonce", nil}, {"textbook", textbook{}}, {"Watermill", watermillRival{}}} {
		if *only != "" && *only != rival.name {
			continue
		}
		sum := torture.Report{}
		for seed := range *seeds {
			opts.Seed, opts.Rival = seed+1, rival.Rival
			report, err := torture.Run(context.Background(), opts)
			if err != nil {
				log.Fatal(err)
			}
			log.Printf("%s: %v", rival.name, report)
			sum.Messages += report.Messages
			sum.Faults += report.Faults
			sum.Lost += report.Lost + report.Stuck
			sum.Doubled += report.Doubled
			sum.OutOfOrder += report.OutOfOrder
		}
		wrong := sum.Lost + sum.Doubled + sum.OutOfOrder
		fmt.Printf("| %s | %d | %d | %d | %d | %d | %d | %.1f |\n", rival.name, *seeds, sum.Messages, sum.Faults, sum.Lost, sum.Doubled, sum.OutOfOrder,
			float64(wrong)/float64(max(sum.Messages, 1))*1e6/float64(max(sum.Faults, 1))*100)
	}
}
