//! Which core a client runs on, and which its server, and how far apart these are.
//!
//! Everything that a server on another core does begins and ends with cache lines that go from core to core. Where
//! cores are virtual, whoever has them moves them: now they share a cache, and now they do not, and lines take several
//! times as long. So that is looked at before each turn, and told.

use crate::cli::Failure;
use farside_bench::compare::rows;
use farside_bench::report::Spread;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The cores that this process may run on: the first is the server's, the last a client's.
pub(super) struct Cores {
    all: Vec<usize>,
    /// As it was when the process began.
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
        *self.all.first().expect("this process runs on some core")
    }

    /// Where client threads run: one has the last core, several what the server has not.
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

    /// Has the calling thread run where clients do.
    pub(super) fn take_client(&self, cores: Option<rows::Cores>, threads: u32) -> Result<(), Failure> {
        Ok(sched_setaffinity(None, &self.clients(cores, threads))?)
    }

    /// Has the calling thread, and who it starts, run where it could at first.
    pub(super) fn release(&self) -> Result<(), Failure> {
        Ok(sched_setaffinity(None, &self.before)?)
    }

    /// Has all threads of a server run on its core.
    pub(super) fn take_server(&self, pid: u32) -> Result<(), Failure> {
        let core = set(&[self.server()]);
        for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let name = entry?.file_name();
            let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            match thread.map(|thread| sched_setaffinity(Some(thread), &core)) {
                // It may have ended meanwhile.
                None | Some(Ok(()) | Err(rustix::io::Errno::SRCH)) => {}
                Some(Err(error)) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// How long a cache line takes from the server's core to the last of the clients', in nanoseconds: the shortest of
    /// a few looks, which take about a millisecond together. Nothing where both are one, or where others keep these
    /// cores so busy that it was not to be seen.
    pub(super) fn distance_ns(&self) -> Result<Option<f64>, Failure> {
        const LOOKS: u32 = 8;
        const RETURNS: u32 = 200;
        const LONGEST: Duration = Duration::from_millis(100);
        const TRIES_PER_CLOCK: u32 = 1024;
        let [there, .., here] = self.all[..] else { return Ok(None) };
        let line = Line(AtomicU32::new(0));
        let until = Instant::now() + LONGEST;
        // Whose turn it is to add one: whoever finds an even number, or an odd one. Nothing if the other never did.
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
        let look = |_| {
            let began = Instant::now();
            (0..RETURNS).try_for_each(|_| take_turn(0))?;
            Some(began.elapsed().as_nanos() as f64 / f64::from(2 * RETURNS))
        };
        let move_to = |core| sched_setaffinity(None, &set(&[core]));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                move_to(there)?;
                let _as_long_as_asked = (0..LOOKS * RETURNS).try_for_each(|_| take_turn(1));
                Ok::<_, Failure>(())
            });
            let own = scope.spawn(|| {
                move_to(here)?;
                Ok::<_, Failure>((0..LOOKS).map_while(look).reduce(f64::min))
            });
            let joined = "it does nothing that could panic";
            let (least, moved) = (own.join().expect(joined), other.join().expect(joined));
            moved?;
            least
        })
    }

    /// For people.
    pub(super) fn told(&self) -> String {
        format!("server on CPU {}, client on CPU {}", self.server(), self.all[self.all.len() - 1])
    }
}

fn set(cores: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    set
}

/// A number that has its cache line, and the one that is fetched with it, to itself.
#[repr(align(128))]
struct Line(AtomicU32);

/// What people are told of distances, which were looked at so often.
pub(super) fn told_distance(ns: &Spread) -> String {
    let Spread { median, min, max } = *ns;
    format!(
        "a cache line takes {median:.0} ns from one to the other ({min:.0} to {max:.0}, looked at before each turn)"
    )
}
