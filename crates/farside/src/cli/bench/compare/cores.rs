//! Which core a client runs on, and which its server.

use crate::cli::Failure;
use farside_bench::compare::rows;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

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
