//! Assigns cores to clients and servers, and measures the distance between these cores.
//!
//! Every request to a server on another core moves cache lines between the two cores. A hypervisor migrates virtual
//! cores. Two of them may share a cache at one time and not at another, when a line takes several times as long.
//! Therefore the distance is measured before each turn, and reported.

use crate::cli::Failure;
use farside_bench::compare::rows;
use farside_bench::report::Spread;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The cores that this process may run on: the first is the server's, the last the client's.
pub(super) struct Cores {
    all: Vec<usize>,
    /// The affinity mask with which the process started.
    before: CpuSet,
}

impl Cores {
    pub(super) fn of_this_process() -> Result<Cores, Failure> {
        let before = sched_getaffinity(None)?;
        let all = (0..CpuSet::MAX_CPU).filter(|&core| before.is_set(core)).collect();
        Ok(Cores { all, before })
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    fn server(&self) -> usize {
        *self.all.first().expect("a process may run on at least one core")
    }

    /// Returns the cores of the client threads:
    /// - One thread: the last core.
    /// - Several threads: all cores but the server's, or all cores if there is no server.
    /// - If server and clients share one core: that core.
    fn clients(&self, cores: Option<rows::Cores>, threads: u32) -> CpuSet {
        let last = &self.all[self.all.len() - 1..];
        let chosen = match cores {
            Some(rows::Cores::One) => &self.all[..1],
            Some(rows::Cores::Two) if threads > 1 => &self.all[1..],
            None if threads > 1 => &self.all,
            _ => last,
        };
        set(chosen)
    }

    /// Moves the calling thread to the cores of the clients.
    pub(super) fn take_client(&self, cores: Option<rows::Cores>, threads: u32) -> Result<(), Failure> {
        Ok(sched_setaffinity(None, &self.clients(cores, threads))?)
    }

    /// Restores the original affinity of the calling thread, because processes that the thread starts inherit its
    /// affinity.
    pub(super) fn release(&self) -> Result<(), Failure> {
        Ok(sched_setaffinity(None, &self.before)?)
    }

    /// Moves all threads of a server to the server's core.
    pub(super) fn take_server(&self, pid: u32) -> Result<(), Failure> {
        let core = set(&[self.server()]);
        for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let name = entry?.file_name();
            let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            match thread.map(|thread| sched_setaffinity(Some(thread), &core)) {
                // A thread that has exited meanwhile is no error.
                None | Some(Ok(()) | Err(rustix::io::Errno::SRCH)) => {}
                Some(Err(error)) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Measures the time in which a cache line moves from the server's core to the last client core, in nanoseconds.
    /// Returns the minimum of a few samples, which take about a millisecond together. Returns `None` if there is only
    /// one core, or if other programs keep the cores too busy for a measurement.
    pub(super) fn distance_ns(&self) -> Result<Option<f64>, Failure> {
        const SAMPLES: u32 = 8;
        const RETURNS: u32 = 200;
        const LONGEST: Duration = Duration::from_millis(100);
        const TRIES_PER_CLOCK: u32 = 1024;
        let [there, .., here] = self.all[..] else { return Ok(None) };
        let line = Line(AtomicU32::new(0));
        let until = Instant::now() + LONGEST;
        // Waits until the number is odd (`is_odd` is 1) or even (`is_odd` is 0), then adds one. Returns `None` if the
        // other thread does not respond in time.
        let take_turn = |is_odd: u32| {
            for tries in 1_u32.. {
                if line.0.load(Ordering::Acquire) % 2 == is_odd {
                    line.0.fetch_add(1, Ordering::Release);
                    return Some(());
                }
                if tries.is_multiple_of(TRIES_PER_CLOCK) && Instant::now() >= until {
                    break;
                }
                std::hint::spin_loop();
            }
            None
        };
        let sample = |_| {
            let began = Instant::now();
            (0..RETURNS).try_for_each(|_| take_turn(0))?;
            Some(began.elapsed().as_nanos() as f64 / f64::from(2 * RETURNS))
        };
        let move_to = |core| sched_setaffinity(None, &set(&[core]));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                move_to(there)?;
                let _in_time = (0..SAMPLES * RETURNS).try_for_each(|_| take_turn(1));
                Ok::<_, Failure>(())
            });
            let own = scope.spawn(|| {
                move_to(here)?;
                Ok::<_, Failure>((0..SAMPLES).map_while(sample).reduce(f64::min))
            });
            let joined = "the thread does not panic";
            let (least, moved) = (own.join().expect(joined), other.join().expect(joined));
            moved?;
            least
        })
    }

    /// Describes the cores of server and client, for people.
    pub(super) fn description(&self) -> String {
        format!("server on CPU {}, client on CPU {}", self.server(), self.all[self.all.len() - 1])
    }
}

fn set(cores: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    set
}

/// A number that shares neither its cache line nor the adjacent line, which the CPU prefetches with it.
#[repr(align(128))]
struct Line(AtomicU32);

/// Describes the distances that were measured between the cores, for people.
pub(super) fn describe_distance(ns: &Spread) -> String {
    let Spread { median, min, max } = *ns;
    format!(
        "a cache line takes {median:.0} ns from one to the other ({min:.0} to {max:.0}, measured before each turn)"
    )
}
