//! Checks the kernel, and this process's privileges and limits.
//!
//! Invariant: the checks acquire no privileges. They only read which privileges the process has.

use super::check::Check;
use crate::cli::human_bytes;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

pub(super) fn checks() -> Vec<Check> {
    let text = super::text;
    let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).map(drop);
    let limits = text("/proc/self/limits");
    let limits = limits.as_deref();
    vec![
        kernel(text("/proc/sys/kernel/osrelease").as_deref(), pidfd.map_err(|errno| errno.to_string())),
        privileges(text("/proc/self/status").as_deref()),
        files(limits),
        locked(limits),
        largest_file(limits),
        address_space(limits),
    ]
}

/// Capabilities that Farside could use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capability {
    NetAdmin,
    IpcLock,
    SysPtrace,
    SysNice,
    Perfmon,
}

impl Capability {
    const ALL: [Capability; 5] = [
        Capability::NetAdmin,
        Capability::IpcLock,
        Capability::SysPtrace,
        Capability::SysNice,
        Capability::Perfmon,
    ];

    /// Returns the capability's bit number, and a text with its name and its use.
    fn described(self) -> (u32, &'static str) {
        match self {
            Capability::NetAdmin => (12, "CAP_NET_ADMIN (UDP buffers beyond the system's maximum)"),
            Capability::IpcLock => (14, "CAP_IPC_LOCK (RDMA without a limit on locked memory)"),
            Capability::SysPtrace => (19, "CAP_SYS_PTRACE (finding the process at a port)"),
            Capability::SysNice => (23, "CAP_SYS_NICE (not used)"),
            Capability::Perfmon => (38, "CAP_PERFMON (perf counters)"),
        }
    }
}

/// Whether a process has a capability in its effective set. `status` is the content of `/proc/PID/status`.
pub(super) fn has(status: &str, capability: Capability) -> bool {
    effective(status).is_some_and(|all| all >> capability.described().0 & 1 == 1)
}

fn effective(status: &str) -> Option<u64> {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

fn kernel(release: Option<&str>, pidfd: Result<(), String>) -> Check {
    const ID: (&str, &str) = ("kernel", "kernel");
    const NEEDED: (u32, u32) = (5, 3);
    let release = release.map(str::trim);
    let version = release.and_then(|release| {
        let mut numbers =
            release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
        Some((numbers.next()??, numbers.next()??))
    });
    let named = release.unwrap_or("of unknown version");
    match (version, pidfd) {
        (Some(version), _) if version < NEEDED => Check::fail(ID.0, ID.1, format!("Linux {named}"))
            .because("pidfds, which report the end of a process, came with 5.3")
            .remedy("boot Linux 5.3 or later"),
        (_, Err(reason)) => Check::fail(ID.0, ID.1, format!("Linux {named}; pidfd_open: {reason}"))
            .because("nodes and clients need it to notice the end of a process")
            .remedy("allow pidfd_open, for example in the container's seccomp profile"),
        (_, Ok(())) => Check::ok(ID.0, ID.1, format!("Linux {named}, with pidfds")),
    }
}

fn privileges(status: Option<&str>) -> Check {
    const ID: (&str, &str) = ("privileges", "privileges");
    let found = status.and_then(|status| {
        let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        Some((users.split_whitespace().nth(1)?.parse::<u32>().ok()?, effective(status)?))
    });
    let (Some((user, all)), Some(status)) = (found, status) else { return Check::unknown(ID.0, ID.1) };
    let held: Vec<&str> = Capability::ALL
        .into_iter()
        .filter(|&capability| has(status, capability))
        .map(|capability| capability.described().1)
        .collect();
    match (user, held.as_slice()) {
        (0, _) if all != 0 => Check::note(ID.0, ID.1, "root")
            .because("no command needs root, and a node of root serves only root over shm"),
        (_, []) => {
            Check::ok(ID.0, ID.1, format!("user {user} without relevant capabilities; none is needed"))
        }
        (_, held) => Check::ok(ID.0, ID.1, format!("user {user} with {}", held.join(", "))),
    }
}

/// Returns the soft and the hard limit in the line `name` of `/proc/PID/limits`. `u64::MAX` stands for "unlimited".
pub(super) fn limit(limits: &str, name: &str) -> Option<(u64, u64)> {
    let rest = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let mut values = rest.split_whitespace().map(|value| match value {
        "unlimited" => Some(u64::MAX),
        value => value.parse().ok(),
    });
    Some((values.next()??, values.next()??))
}

fn reported(bytes: u64) -> String {
    if bytes == u64::MAX { "unlimited".into() } else { human_bytes(bytes) }
}

fn files(limits: Option<&str>) -> Check {
    const ID: (&str, &str) = ("limit.files", "open files");
    const PLENTY: u64 = 4096;
    // The hard limit is checked, because `allow_descriptors` raises the soft limit to it.
    let Some((_, most)) = limits.and_then(|limits| limit(limits, "Max open files")) else {
        return Check::unknown(ID.0, ID.1);
    };
    let found = if most == u64::MAX { "unlimited".into() } else { format!("at most {most}") };
    match most {
        PLENTY.. => Check::ok(ID.0, ID.1, found),
        _ => Check::warn(ID.0, ID.1, found)
            .because("a node has up to 1024 clients, and each needs several")
            .remedy("LimitNOFILE=65536 in the unit, or a 'hard nofile' in /etc/security/limits.conf"),
    }
}

fn locked(limits: Option<&str>) -> Check {
    const ID: (&str, &str) = ("limit.memlock", "locked memory");
    match limits.and_then(|limits| limit(limits, "Max locked memory")) {
        Some((now, most)) => {
            Check::ok(ID.0, ID.1, format!("{} of at most {}", reported(now), reported(most)))
                .because("RDMA alone locks memory")
        }
        None => Check::unknown(ID.0, ID.1),
    }
}

fn largest_file(limits: Option<&str>) -> Check {
    const ID: (&str, &str) = ("limit.file_size", "size of files");
    bounded(ID, limits, "Max file size", "shared memory counts as a file", "ulimit -f unlimited")
}

fn address_space(limits: Option<&str>) -> Check {
    const ID: (&str, &str) = ("limit.address_space", "address space");
    bounded(ID, limits, "Max address space", "all of a node's memory is mapped", "ulimit -v unlimited")
}

fn bounded(
    (id, what): (&'static str, &'static str),
    limits: Option<&str>,
    name: &str,
    why: &'static str,
    remedy: &str,
) -> Check {
    const PLENTY: u64 = 8 << 30;
    match limits.and_then(|limits| limit(limits, name)) {
        None => Check::unknown(id, what),
        Some((now @ PLENTY.., _)) => Check::ok(id, what, reported(now)),
        Some((now, _)) => Check::warn(id, what, reported(now)).because(why).remedy(remedy),
    }
}

/// Runs the checks on arbitrary text instead of the system's files.
#[cfg(test)]
pub(super) fn of_any(text: &str) -> Vec<Check> {
    let any = Some(text);
    vec![kernel(any, Ok(())), privileges(any), files(any), locked(any), largest_file(any), address_space(any)]
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;

    #[test]
    fn a_kernel_without_pidfds_fails() {
        let fine = || Result::Ok(());
        for release in ["5.3.0\n", "6.18.44-x\n", "5.15.0-91-generic", "10.0", "5.3-rc1"] {
            is(&kernel(Some(release), fine()), Ok, release.trim(), "");
        }
        for release in ["5.2.99", "4.18.0-553.el8.x86_64", "3.10"] {
            is(&kernel(Some(release), fine()), Fail, release, "5.3 or later");
        }
        is(&kernel(Some("6.1"), Err("not permitted".into())), Fail, "pidfd_open: not permitted", "seccomp");
        is(&kernel(None, Err("not implemented".into())), Fail, "unknown version; pidfd_open", "seccomp");
        for odd in [None, Some(""), Some("six"), Some("6")] {
            is(&kernel(odd, fine()), Ok, "with pidfds", "");
        }
    }

    #[test]
    fn root_is_a_note() {
        let of =
            |user: &str, bits: &str| privileges(Some(&format!("Uid:\t1\t{user}\t1\t1\nCapEff:\t{bits}\n")));
        is(&of("1000", "0000000000000000"), Ok, "user 1000 without", "");
        is(&of("1000", "0000000000005000"), Ok, "user 1000 with CAP_NET_ADMIN (UDP buffers", "");
        is(&of("1000", "0000000000005000"), Ok, "CAP_IPC_LOCK", "");
        is(&of("0", "000001ffffffffff"), Note, "root", "");
        is(&of("0", "0000000000000000"), Ok, "user 0 without", "");
        for (user, bits) in [("x", "0"), ("0", "g"), ("-1", "0"), ("0", "")] {
            is(&of(user, bits), Note, "not known here", "");
        }
        is(&privileges(None), Note, "not known here", "");
        assert!(has("CapEff:\t0000004000000000\n", Capability::Perfmon));
        assert!(!has("CapEff:\t0000002000000000\n", Capability::Perfmon) && !has("", Capability::Perfmon));
    }

    #[test]
    fn limits_are_read_by_name_and_judged_by_a_nodes_needs() {
        let of = |name: &str, now: &str, most: &str| {
            let heading = "Limit                     Soft Limit           Hard Limit           Units";
            format!("{heading}\n{name:<26}{now:<21}{most:<21}units\n")
        };
        is(&files(Some(&of("Max open files", "1024", "524288"))), Ok, "at most 524288", "");
        is(&files(Some(&of("Max open files", "1024", "4095"))), Warn, "at most 4095", "LimitNOFILE");
        is(&files(Some(&of("Max open files", "1024", "unlimited"))), Ok, "unlimited", "");
        is(
            &locked(Some(&of("Max locked memory", "65536", "unlimited"))),
            Ok,
            "64.0 KiB of at most unlimited",
            "",
        );
        is(&largest_file(Some(&of("Max file size", "unlimited", "unlimited"))), Ok, "unlimited", "");
        is(&largest_file(Some(&of("Max file size", "1048576", "unlimited"))), Warn, "1.0 MiB", "ulimit -f");
        is(&address_space(Some(&of("Max address space", "1073741824", "x9"))), Note, "not known", "");
        is(
            &address_space(Some(&of("Max address space", "1073741824", "2147483648"))),
            Warn,
            "1.0 GiB",
            "ulimit -v",
        );
        for odd in [None, Some(""), Some("Max open files"), Some("Max open files many more files")] {
            is(&files(odd), Note, "not known here", "");
            is(&locked(odd), Note, "not known here", "");
            is(&largest_file(odd), Note, "not known here", "");
        }
    }
}
