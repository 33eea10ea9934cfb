//! The clients of a node that died, when another takes over its memory: as long as one of them lives, it may be in
//! the middle of a chain on that memory, even while it is stopped.
//!
//! A process is known by its pid, when it began, and which start of the machine that was.

use super::clients::BindError;
use super::process::start_time;
use farside_fabrics::memory::Mapping;
use farside_remote::Memory;
use farside_remote::arena::{SESSIONS_MAX, header};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How long a process that was killed may take to end.
const END_WAIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Sees to it that no old client is alive: with `evict` by killing those that are.
pub(super) fn see_off(memory: &Mapping, evict: bool) -> Result<(), BindError> {
    let alive = alive(memory);
    if alive.is_empty() {
        return Ok(());
    }
    if !evict {
        return Err(BindError::OldClients(alive));
    }
    for pid in alive {
        tracing::warn!(pid, "killing a client of the node that served this memory before");
        kill(pid).map_err(|errno| BindError::System("kill an old client", errno.into()))?;
    }
    // Whoever did not end is still named.
    see_off(memory, false)
}

fn kill(pid: u32) -> rustix::io::Result<()> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    pidfd_send_signal(&pidfd, Signal::KILL)?;
    poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&END_WAIT)).map(drop)
}

/// The processes of old sessions that are alive.
fn alive(memory: &Mapping) -> Vec<u32> {
    let mut boot = [0; 16];
    let Ok(()) = memory.read(header::BOOT_AT, &mut boot);
    if boot != this_boot() {
        return Vec::new();
    }
    let sessions = (0..SESSIONS_MAX).filter_map(|slot| {
        let Ok(session) = memory.arena().session(slot);
        session
    });
    let mut pids: Vec<u32> = sessions
        .filter(|&(_, pid, began)| {
            pid != std::process::id() && start_time(pid) == Some(began) && !has_ended(pid)
        })
        .map(|(_, pid, _)| pid)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Whether a process runs no more, though its parent has not asked what became of it.
fn has_ended(pid: u32) -> bool {
    const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return true };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&AT_ONCE)).is_ok_and(|ready| ready > 0)
        }
        Err(errno) => errno == rustix::io::Errno::SRCH,
    }
}

/// Notes which start of the machine the sessions to come belong to.
pub(super) fn note_boot(memory: &Mapping) {
    let Ok(()) = memory.write(header::BOOT_AT, &this_boot());
}

/// The system's name for this start of the machine; zeros where it has none.
fn this_boot() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_le_bytes()
}
