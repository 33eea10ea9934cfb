//! Repeats one kind of request: one at a time to measure each latency, or many in flight to measure the rate.
//!
//! Invariant: every response is checked, and at the end also the memory that the requests changed. So only requests
//! that were really executed are counted.
//! Invariant: no memory of this process is allocated between two chains.
//! Invariant: each request runs in its own turn, as in a program that does one operation at a time. Only requests that
//! are in flight together share a turn.

use crate::cli::Failure;
use farside::Pool;
use farside::parts::Endpoint;
use farside_bench::report::Latencies;
use farside_fabrics::executor::{Core, Turns, block_on};
use farside_remote::{BoundedPtr, NodeId};
use farside_systems::raw::{Raw, RawError};
use farside_systems::store::StoreError;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use zerocopy::little_endian::{U64, U128};

/// Kind of request that a test repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read,
    Write,
    FetchAdd,
    Cas,
    Get,
    Put,
    Call,
}

impl Request {
    pub(super) fn name(self) -> &'static str {
        match self {
            Request::Read => "READ",
            Request::Write => "WRITE",
            Request::FetchAdd => "FETCH-ADD",
            Request::Cas => "CAS",
            Request::Get => "GET Chain",
            Request::Put => "PUT Chain",
            Request::Call => "Call",
        }
    }

    pub(super) fn about(self) -> &'static str {
        match self {
            Request::Read => "a chain of one READ",
            Request::Write => "a chain of one WRITE, acknowledged",
            Request::FetchAdd => "a chain of one FETCH-ADD, to a word that no other client changes",
            Request::Cas => "a chain of one CAS that swaps, of a word that no other client changes",
            Request::Get => "a chain of READ the pointer, READ what it points to",
            Request::Put => "a chain of WRITE the bound, ALLOCATE, CAS the pointer, READ it",
            Request::Call => "a call that returns the bytes of its request",
        }
    }
}

/// Length of a measurement: a number of requests, or a time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    Iterations(u64),
    Time(Duration),
}

/// Latencies of requests that were sent one at a time.
pub(super) struct Latency {
    pub(super) iterations: u64,
    pub(super) min_ns: f64,
    pub(super) max_ns: f64,
    pub(super) mean_ns: f64,
    /// Sum of the squared distances of the latencies from their mean, in ns².
    squares: f64,
    latencies: Latencies,
}

impl Latency {
    fn new() -> Latency {
        Latency {
            iterations: 0,
            min_ns: f64::INFINITY,
            max_ns: 0.0,
            mean_ns: 0.0,
            squares: 0.0,
            latencies: Latencies::new(),
        }
    }

    #[inline]
    fn record(&mut self, latency: Duration) {
        self.latencies.record(latency);
        self.iterations += 1;
        let ns = latency.as_nanos() as f64;
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
        // This is Welford's algorithm, in which no sum grows so large that it loses precision.
        let distance = ns - self.mean_ns;
        self.mean_ns += distance / self.iterations as f64;
        self.squares += distance * (ns - self.mean_ns);
    }

    pub(super) fn stdev_ns(&self) -> f64 {
        (self.squares / self.iterations as f64).sqrt()
    }

    /// Returns a percentile of the latencies in microseconds. It is clamped to the measured range, because the
    /// histogram is coarse.
    pub(super) fn percentile_us(&self, percent: f64) -> f64 {
        self.latencies.percentile_us(percent).clamp(self.min_ns / 1e3, self.max_ns / 1e3)
    }
}

/// Number and rates of requests of which many were in flight.
pub(super) struct Bandwidth {
    pub(super) iterations: u64,
    pub(super) per_s: f64,
    /// Rate of the fastest [`Bandwidth::stretch`] consecutive requests; the mean rate if there were fewer requests than
    /// that.
    pub(super) peak_per_s: f64,
    pub(super) stretch: u64,
}

/// Maximum number of requests in the warm-up.
const WARM_UP: u64 = 1000;
/// Maximum duration of the warm-up.
const WARM_UP_MAX: Duration = Duration::from_millis(100);
/// Minimum number of requests in a stretch: consecutive requests whose rate is measured to find the peak rate.
const STRETCH_MIN: u64 = 512;
/// Minimum number of requests in a stretch, as a multiple of the number of requests in flight.
const STRETCH_DEPTHS: u64 = 8;

/// A client core with its tasks, each of which has at most one request in flight.
pub(super) struct Worker {
    endpoint: Rc<Endpoint>,
    tasks: Vec<Task>,
}

impl Worker {
    /// Opens a session with the store, for `depth` tasks, or for one task if `depth` is `None`.
    ///
    /// # Errors
    /// The store does not exist, or no session can be opened.
    pub(super) fn open(
        pool: &Pool,
        store: &str,
        request: Request,
        depth: Option<u32>,
    ) -> Result<Worker, Failure> {
        let endpoint = Rc::new(pool.endpoint_here()?);
        let open = |task: u32| {
            let raw = block_on(&endpoint, Raw::open(Rc::clone(&endpoint), NodeId(0), store));
            let raw = raw.map_err(|error| {
                Failure::Error(match error {
                    StoreError::Gone(reason) => format!(
                        "{reason}; only a server started with 'farside perf' has a store '{store}': measure any other \
                         node with --pool {}",
                        pool.url()
                    ),
                    other => other.to_string(),
                })
            })?;
            Ok::<_, Failure>(Task {
                raw,
                request,
                number: task.into(),
                at: 0,
                bytes: Vec::new(),
                word: 0,
                held: BoundedPtr::default(),
            })
        };
        let tasks = (0..depth.unwrap_or(1)).map(open).collect::<Result<_, _>>()?;
        Ok(Worker { endpoint, tasks })
    }

    /// Prepares the store's memory for requests of `size` bytes.
    ///
    /// # Errors
    /// The node refuses a request, or another client uses the same store.
    pub(super) fn prepare(&mut self, size: usize) -> Result<(), Failure> {
        let endpoint = Rc::clone(&self.endpoint);
        self.tasks.iter_mut().try_for_each(|task| Ok(block_on(&endpoint, task.prepare(size))?))
    }

    /// Checks that the store's memory holds what the requests should have written.
    ///
    /// # Errors
    /// The memory holds something else, or a request failed.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        let endpoint = Rc::clone(&self.endpoint);
        self.tasks.iter_mut().try_for_each(|task| Ok(block_on(&endpoint, task.check())?))
    }

    /// Measures the latency of each request, one after another. A latency is the interval between two readings of the
    /// clock. It contains one request, and the recording of the previous latency.
    ///
    /// # Errors
    /// A request failed, or returned wrong bytes.
    pub(super) fn latency(&mut self, until: Until) -> Result<Latency, Failure> {
        let (endpoint, task) = (&*self.endpoint, self.tasks.first_mut().expect("there is at least one task"));
        let is_direct = endpoint.memory().is_some();
        let latency = block_on(endpoint, async {
            let began = Instant::now();
            let mut warm = 0;
            while warm < WARM_UP && began.elapsed() < WARM_UP_MAX {
                task.once().await?;
                warm += 1;
                if is_direct {
                    endpoint.end_turn();
                }
            }
            let mut latency = Latency::new();
            let began = Instant::now();
            let mut last = began;
            loop {
                task.once().await?;
                // On fabrics without direct access to memory, each request waits for its reply, which ends the turn.
                if is_direct {
                    endpoint.end_turn();
                }
                let now = Instant::now();
                latency.record(now - last);
                last = now;
                let is_over = match until {
                    Until::Iterations(iterations) => latency.iterations >= iterations,
                    Until::Time(duration) => now - began >= duration,
                };
                if is_over {
                    return Ok::<_, RawError>(latency);
                }
            }
        })?;
        Ok(latency)
    }

    /// Measures the rate of requests while each task has one request in flight.
    ///
    /// # Errors
    /// A request failed, or returned wrong bytes.
    pub(super) fn bandwidth(&mut self, until: Until) -> Result<Bandwidth, Failure> {
        let warm = Cell::new(WARM_UP);
        let began = Instant::now();
        self.flood(|| began.elapsed() < WARM_UP_MAX && take(&warm), || {})?;

        let stretch = STRETCH_MIN.max(STRETCH_DEPTHS * self.tasks.len() as u64);
        let stopped = AtomicBool::new(false);
        let left = Cell::new(match until {
            Until::Iterations(iterations) => iterations,
            Until::Time(_) => u64::MAX,
        });
        let count = Cell::new(0u64);
        let shortest = Cell::new(None::<Duration>);
        std::thread::scope(|scope| {
            let (ended, end) = mpsc::channel::<()>();
            if let Until::Time(duration) = until {
                let stopped = &stopped;
                scope.spawn(move || {
                    // The channel is closed when the measurement has ended before the time is over.
                    let _in_time = end.recv_timeout(duration);
                    stopped.store(true, Ordering::Relaxed);
                });
            }
            let began = Instant::now();
            let since = Cell::new(began);
            let done = || {
                count.set(count.get() + 1);
                if count.get().is_multiple_of(stretch) {
                    let now = Instant::now();
                    let took = now - since.replace(now);
                    shortest.set(Some(shortest.get().map_or(took, |shortest| shortest.min(took))));
                }
            };
            self.flood(|| !stopped.load(Ordering::Relaxed) && take(&left), done)?;
            let per_s = count.get() as f64 / began.elapsed().as_secs_f64();
            drop(ended);
            let peak_per_s = shortest.get().map_or(per_s, |took| stretch as f64 / took.as_secs_f64());
            // The requests after the last stretch may have been the fastest, so the mean rate may exceed the peak.
            Ok(Bandwidth { iterations: count.get(), per_s, peak_per_s: peak_per_s.max(per_s), stretch })
        })
    }

    /// Lets every task send requests while `more` returns true. Calls `done` after each completed request.
    fn flood(&mut self, more: impl Fn() -> bool, done: impl Fn()) -> Result<(), Failure> {
        let endpoint = &*self.endpoint;
        let is_alone_and_direct = self.tasks.len() == 1 && endpoint.memory().is_some();
        let failed: RefCell<Option<RawError>> = RefCell::new(None);
        let mut core = Core::new(endpoint);
        for task in &mut self.tasks {
            let (failed, more, done) = (&failed, &more, &done);
            core.spawn(async move {
                while failed.borrow().is_none() && more() {
                    if let Err(error) = task.once().await {
                        failed.borrow_mut().get_or_insert(error);
                        return;
                    }
                    done();
                    if is_alone_and_direct {
                        endpoint.end_turn();
                    }
                }
            });
        }
        core.run();
        drop(core);
        failed.into_inner().map_or(Ok(()), |error| Err(error.into()))
    }
}

/// Decrements the counter `left`. Returns false, without a change, if the counter is 0.
fn take(left: &Cell<u64>) -> bool {
    let some = left.get() > 0;
    left.set(left.get() - u64::from(some));
    some
}

/// A client task with one request in flight, on its own part of the store's memory.
struct Task {
    raw: Raw<Rc<Endpoint>>,
    request: Request,
    number: u64,
    /// Offset in the store's memory of the bytes that the task reads and writes.
    at: u64,
    /// Bytes that the task writes, and expects to read.
    bytes: Vec<u8>,
    /// Expected value of the task's word, which atomics change.
    word: u128,
    /// Expected value of the task's slot, which PUT chains change.
    held: BoundedPtr,
}

/// Maximum number of bytes of a WRITE that prepares memory for READs.
const PIECE: usize = 1 << 15;

const MEDDLED: RawError =
    RawError::Conflict("memory does not hold what this client wrote, so these figures are invalid");

impl Task {
    async fn prepare(&mut self, size: usize) -> Result<(), RawError> {
        // The tasks' bytes are adjacent, so that small ones stay in the caches, like perftest's single buffer.
        self.at = self.number * size.next_multiple_of(64) as u64;
        self.bytes = (0..size).map(|at| (at as u64 + 37 * self.number + 1) as u8).collect();
        match self.request {
            Request::Read => {
                // The bytes are written in pieces, because one READ can return more bytes than one WRITE can carry.
                for (at, piece) in (self.at..).step_by(PIECE).zip(self.bytes.chunks(PIECE)) {
                    self.raw.write(at, piece).await?;
                }
            }
            Request::Write => self.raw.write(self.at, &vec![0; size]).await?,
            Request::FetchAdd | Request::Cas => {
                let mut word = [0; 16];
                word[..size].copy_from_slice(self.raw.read(self.at, size as u32).await?);
                self.word = u128::from_le_bytes(word);
            }
            Request::Get | Request::Put => {
                self.held = self.raw.pointer(self.number).await?;
                self.held = self.raw.put(self.number, self.held, &self.bytes).await?;
            }
            Request::Call => {}
        }
        Ok(())
    }

    #[inline]
    async fn once(&mut self) -> Result<(), RawError> {
        match self.request {
            Request::Read => {
                let found = self.raw.read(self.at, self.bytes.len() as u32).await?;
                same_ends(found, &self.bytes)
            }
            Request::Write => self.raw.write(self.at, &self.bytes).await,
            Request::FetchAdd => {
                let old = self.raw.fetch_add(self.at, 1).await?;
                let is_ours = u128::from(old) == self.word;
                self.word = u128::from(old.wrapping_add(1));
                if is_ours { Ok(()) } else { Err(MEDDLED) }
            }
            Request::Cas => {
                let (old, new) = (self.word, self.word.wrapping_add(1));
                let found: u128 = if self.bytes.len() == 8 {
                    let (old, new) = (U64::new(old as u64), U64::new(new as u64));
                    self.raw.cas(self.at, &old, &new).await?.get().into()
                } else {
                    self.raw.cas(self.at, &U128::new(old), &U128::new(new)).await?.get()
                };
                self.word = new;
                if found == old { Ok(()) } else { Err(MEDDLED) }
            }
            Request::Get => {
                let found = self.raw.get(self.number, self.bytes.len() as u32).await?;
                same_ends(found, &self.bytes)
            }
            Request::Put => {
                self.held = self.raw.put(self.number, self.held, &self.bytes).await?;
                Ok(())
            }
            Request::Call => {
                let answer = self.raw.echo(&self.bytes).await?;
                same_ends(answer, &self.bytes)
            }
        }
    }

    /// Checks that the task's memory holds what its requests should have written.
    async fn check(&mut self) -> Result<(), RawError> {
        let len = self.bytes.len() as u32;
        let is_right = match self.request {
            Request::Read | Request::Write => self.raw.read(self.at, len).await? == self.bytes,
            Request::FetchAdd | Request::Cas => {
                self.raw.read(self.at, len).await? == &self.word.to_le_bytes()[..len as usize]
            }
            Request::Get | Request::Put => self.raw.get(self.number, len).await? == self.bytes,
            Request::Call => self.raw.echo(&self.bytes).await? == self.bytes,
        };
        if is_right { Ok(()) } else { Err(MEDDLED) }
    }
}

/// Checks the length, the first byte and the last byte of a response.
#[inline]
fn same_ends(found: &[u8], expected: &[u8]) -> Result<(), RawError> {
    let is_same =
        found.len() == expected.len() && found.first() == expected.first() && found.last() == expected.last();
    if is_same { Ok(()) } else { Err(MEDDLED) }
}
