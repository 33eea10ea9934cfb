//! The clients of a dead node whose memory another node takes over. As long as such a client's process lives, even
//! stopped, it may be in the middle of a chain on that memory.
//!
//! A session that ended properly has no number in its slot, and the node does not wait for its process: the code that
//! ran its chains cleared the number with its last access
//! ([`leave_session`](farside_remote::arena::Arena::leave_session)). A process is identified by its pid, its start
//! time, and the boot id of the machine.

use super::clients::BindError;
use super::process::start_time;
use farside_fabrics::memory::Mapping;
use farside_remote::Memory;
use farside_remote::arena::{SESSIONS_MAX, header};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Maximum time for a killed process to exit.
const END_WAIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Makes sure that no client of the old node is alive. With `evict`, first kills the old clients that are alive.
pub(super) fn ensure_no_old_clients(memory: &Mapping, evict: bool) -> Result<(), BindError> {
    let mut alive = alive(memory);
    // This process's own sessions are excluded: `is_mapped` tells whether it still uses the memory, and it must not
    // kill itself.
    alive.retain(|&pid| pid != std::process::id());
    if farside_fabrics::shm::is_mapped(memory) {
        return Err(BindError::OwnClients);
    }
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
    // Check again, and report each process that did not exit.
    ensure_no_old_clients(memory, false)
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

/// Pids of the live processes of old sessions.
fn alive(memory: &Mapping) -> Vec<u32> {
    let mut boot = [0; 16];
    let Ok(()) = memory.read(header::BOOT_AT, &mut boot);
    let this = this_boot();
    if boot != this && boot != NO_BOOT && this != NO_BOOT {
        return Vec::new();
    }
    let sessions = (0..SESSIONS_MAX).filter_map(|slot| {
        let Ok(session) = memory.arena().session(slot);
        session
    });
    let mut pids: Vec<u32> =
        sessions.filter(|&(_, pid, began)| is_alive(pid, began)).map(|(_, pid, _)| pid).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

/// Whether the process that had this pid and start time is alive. If the system does not report start times, a process
/// with the same pid is taken for the same process.
fn is_alive(pid: u32, began: u64) -> bool {
    !has_ended(pid) && start_time(pid).is_none_or(|started| began == UNKNOWN || started == began)
}

/// Value that is recorded if the start time of a process is unknown.
const UNKNOWN: u64 = 0;

/// Whether a process has exited. A process that exited and that its parent has not waited for counts as well.
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

/// Whether the machine has not been started anew since a node served this memory, as far as that is known.
pub(super) fn is_same_boot(memory: &Mapping) -> bool {
    let mut boot = [0; 16];
    let Ok(()) = memory.read(header::BOOT_AT, &mut boot);
    boot == this_boot() && boot != NO_BOOT
}

/// Records the machine's boot id in the memory. Future sessions belong to this boot.
pub(super) fn note_boot(memory: &Mapping) {
    let Ok(()) = memory.write(header::BOOT_AT, &this_boot());
}

/// The boot id to record if the system reports none.
const NO_BOOT: [u8; 16] = [0; 16];

/// Returns the id of the machine's current boot.
fn this_boot() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_fabrics::memory::Pages;
    use farside_remote::arena::session::SessionId;

    #[test]
    fn a_process_counts_as_dead_only_if_that_is_certain() {
        let memory = Mapping::create(8 << 20, Pages::Small).expect("memory");
        let own = std::process::id();
        let began = start_time(own).expect("it is alive");
        let mut child = std::process::Command::new("true").spawn().expect("it can be started");
        let ended = child.id();
        child.wait().expect("it is our child");
        let note = |slot: u32, pid: u32, began: u64| {
            let Ok(()) = memory.arena().open_session(SessionId { slot, number: slot + 1 }, pid, began);
        };
        note(0, ended, began);
        note(1, ended, UNKNOWN);
        note(2, own, began + 1);
        note_boot(&memory);
        assert_eq!(alive(&memory), [0; 0]);
        note(3, own, UNKNOWN);
        assert_eq!(alive(&memory), [own], "it may be this one");
        note(3, own, began);
        assert_eq!(alive(&memory), [own]);
        ensure_no_old_clients(&memory, true).expect("no client of this process has it mapped");
    }

    #[test]
    fn a_session_that_was_left_is_not_waited_for() {
        let memory = Mapping::create(8 << 20, Pages::Small).expect("memory");
        let own = std::process::id();
        note_boot(&memory);
        let (former, present) = (SessionId { slot: 5, number: 1 }, SessionId { slot: 5, number: 2 });
        let Ok(()) = memory.arena().open_session(present, own, UNKNOWN);
        let Ok(()) = memory.arena().leave_session(former);
        assert_eq!(alive(&memory), [own], "the slot has another session by now");
        let Ok(()) = memory.arena().leave_session(present);
        assert_eq!(alive(&memory), [0; 0]);
    }
}
