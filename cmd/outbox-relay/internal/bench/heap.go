package bench

import (
	"runtime/metrics"
	"time"
)

// heapEvery is how often the heap is measured.
const heapEvery = 10 * time.Millisecond

// heapMB is the size of the heap: live memory, and garbage that is not collected yet.
func heapMB() *float64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return nil
	}
	megabytes := float64(sample[0].Value.Uint64()) / 1e6
	return &megabytes
}

// heapWatch finds the peak. It does nothing until it begins.
type heapWatch struct {
	stop chan struct{}
	peak chan *float64
}

func (w *heapWatch) begin() {
	w.stop, w.peak = make(chan struct{}), make(chan *float64)
	go func() {
		every := time.NewTicker(heapEvery)
		defer every.Stop()
		peak := heapMB()
		for {
			select {
			case <-w.stop:
				w.peak <- peak
				return
			case <-every.C:
				if now := heapMB(); now != nil && *now > *peak {
					peak = now
				}
			}
		}
	}()
}

func (w *heapWatch) end() *float64 {
	if w.stop == nil {
		return nil
	}
	close(w.stop)
	return <-w.peak
}
