//! One request, again and again: one at a time with the time of each, or many at once with the rate of all.
//!
//! Invariant: what comes back is looked at, and where the requests change memory it is looked at when they have ended:
//! nothing is counted that was not done. Invariant: from one chain to the next nothing is allocated here.
//! Invariant: a request is a turn of the client core by itself unless others are under way, as it is in a program that
//! asks for one thing at a time.

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

/// What is asked.
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
            Request::FetchAdd => "a chain of one FETCH-ADD, to a word that nobody else changes",
            Request::Cas => "a chain of one CAS that swaps, of a word that nobody else changes",
            Request::Get => "a chain of READ the pointer, READ what it points to",
            Request::Put => "a chain of WRITE the bound, ALLOCATE, CAS the pointer, READ it",
            Request::Call => "a call, answered with the bytes that it brought",
        }
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    Iterations(u64),
    Time(Duration),
}

/// What came of requests one at a time, in nanoseconds.
pub(super) struct Latency {
    pub(super) iterations: u64,
    pub(super) min_ns: f64,
    pub(super) max_ns: f64,
    pub(super) mean_ns: f64,
    /// The sum of squared distances from the mean.
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
        // By Welford: neither sum grows beyond what it can tell apart.
        let distance = ns - self.mean_ns;
        self.mean_ns += distance / self.iterations as f64;
        self.squares += distance * (ns - self.mean_ns);
    }

    pub(super) fn stdev_ns(&self) -> f64 {
        (self.squares / self.iterations as f64).sqrt()
    }

    /// In microseconds; never outside of what was seen, however coarse the histogram is.
    pub(super) fn percentile_us(&self, percent: f64) -> f64 {
        self.latencies.percentile_us(percent).clamp(self.min_ns / 1e3, self.max_ns / 1e3)
    }
}

/// What came of many at once.
pub(super) struct Bandwidth {
    pub(super) iterations: u64,
    pub(super) per_s: f64,
    /// In the best stretch of [`Bandwidth::stretch`] requests; if there was none, of all.
    pub(super) peak_per_s: f64,
    pub(super) stretch: u64,
}

/// How many requests are done before those that count, and for how long.
const WARM_UP: u64 = 1000;
const WARM_UP_MAX: Duration = Duration::from_millis(100);
/// Peaks are of so many requests at least, and of so many times the depth.
const STRETCH_MIN: u64 = 512;
const STRETCH_DEPTHS: u64 = 8;

/// All that a client core asks.
pub(super) struct Worker {
    endpoint: Rc<Endpoint>,
    tasks: Vec<Task>,
}

impl Worker {
    /// Connects, with so many tasks, or one.
    ///
    /// # Errors
    /// There is no such store, or no session.
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
                Failure::Told(match error {
                    StoreError::Gone(reason) => format!(
                        "{reason}; where 'farside perf' serves there is a store '{store}': measure any other node by \
                         --pool {}",
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

    /// Makes memory ready for requests of that size.
    ///
    /// # Errors
    /// The node refuses, or another client is at the same store.
    pub(super) fn prepare(&mut self, size: usize) -> Result<(), Failure> {
        let endpoint = Rc::clone(&self.endpoint);
        self.tasks.iter_mut().try_for_each(|task| Ok(block_on(&endpoint, task.prepare(size))?))
    }

    /// Looks whether memory is as the requests should have left it.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn check(&mut self) -> Result<(), Failure> {
        let endpoint = Rc::clone(&self.endpoint);
        self.tasks.iter_mut().try_for_each(|task| Ok(block_on(&endpoint, task.check())?))
    }

    /// Times each of so many requests, or all in so long, one after another. From one reading of the clock to the next
    /// there is one request, and the counting of the one before.
    ///
    /// # Errors
    /// A request failed, or brought what is wrong.
    pub(super) fn latency(&mut self, until: Until) -> Result<Latency, Failure> {
        let (endpoint, task) = (&*self.endpoint, self.tasks.first_mut().expect("there is one"));
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
                // Over a wire every request waits, and a turn ends by that.
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

    /// Counts requests while each task has one under way.
    ///
    /// # Errors
    /// A request failed, or brought what is wrong.
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
                    // An error: it has ended before.
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
            // What is left over from the last stretch may have been the fastest.
            Ok(Bandwidth { iterations: count.get(), per_s, peak_per_s: peak_per_s.max(per_s), stretch })
        })
    }

    /// Has every task ask for as long as there is more, and tells of each request that is done.
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

/// One less, if there is one.
fn take(left: &Cell<u64>) -> bool {
    let some = left.get() > 0;
    left.set(left.get() - u64::from(some));
    some
}

/// Whoever has one request under way at a time, on memory of its own.
struct Task {
    raw: Raw<Rc<Endpoint>>,
    request: Request,
    number: u64,
    /// Where it reads and writes.
    at: u64,
    /// What it writes, and finds.
    bytes: Vec<u8>,
    /// What its word holds, as it last left it.
    word: u128,
    /// What its slot holds, as it last left it.
    held: BoundedPtr,
}

/// Memory is made ready by WRITEs of so many bytes.
const PIECE: usize = 1 << 15;

const MEDDLED: RawError =
    RawError::Meddled("memory holds something else than was put there, so these figures are worth nothing");

impl Task {
    async fn prepare(&mut self, size: usize) -> Result<(), RawError> {
        // Tasks lie side by side, so that what is small stays in the caches, as perftest's one buffer does.
        self.at = self.number * size.next_multiple_of(64) as u64;
        self.bytes = (0..size).map(|at| (at as u64 + 37 * self.number + 1) as u8).collect();
        match self.request {
            Request::Read => {
                // What one READ brings may be more than one WRITE takes along.
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

    /// Looks at all that the requests have left.
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

/// Whether as many bytes came as were there, with the same at both ends.
#[inline]
fn same_ends(found: &[u8], expected: &[u8]) -> Result<(), RawError> {
    let is_same =
        found.len() == expected.len() && found.first() == expected.first() && found.last() == expected.last();
    if is_same { Ok(()) } else { Err(MEDDLED) }
}
