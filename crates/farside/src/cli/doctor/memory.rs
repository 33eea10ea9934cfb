//! Checks the memory that a node can lend, and the pages that back it.
//!
//! Invariant: information that the system does not provide is not guessed.

use super::check::Check;
use crate::cli::human_bytes;
use crate::cli::machine::bytes;
use farside_fabrics::memory::Mapping;

const GIB: u64 = 1 << 30;
const HUGE: u64 = 2 << 20;

pub(super) fn checks() -> Vec<Check> {
    let text = super::text;
    let are_made = are_made();
    let groups = super::groups(text("/proc/self/cgroup").as_deref(), "memory");
    let limits: Vec<_> = groups.iter().map(|folder| Group::read(folder)).collect();
    vec![
        available(text("/proc/meminfo").as_deref()),
        group(&limits),
        huge_pages_if(are_made),
        transparent(are_made),
        noexec(text("/proc/sys/vm/memfd_noexec").as_deref()),
    ]
}

/// Checks the huge pages alone.
#[cfg(feature = "verbs")]
pub(super) fn huge_pages() -> Check {
    huge_pages_if(are_made())
}

/// Whether the system forms huge pages without a reservation, if that is known.
fn are_made() -> Option<bool> {
    let setting = super::text("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    Mapping::makes_pages_huge().ok().map(|are_made| are_made || gives_pages(setting.as_deref()))
}

fn huge_pages_if(are_made: Option<bool>) -> Check {
    let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let number = |name: &str| super::text(&format!("{pool}/{name}"));
    huge(number("nr_hugepages").as_deref(), number("free_hugepages").as_deref(), are_made)
}

fn available(meminfo: Option<&str>) -> Check {
    const ID: (&str, &str) = ("memory.available", "memory");
    let found =
        meminfo.and_then(|text| Some((bytes(text, "MemAvailable")?, bytes(text, "SwapFree").unwrap_or(0))));
    let Some((memory, swap)) = found else { return Check::unknown(ID.0, ID.1) };
    let found = format!("{} available, {} of swap", human_bytes(memory), human_bytes(swap));
    if memory >= GIB {
        return Check::ok(ID.0, ID.1, found);
    }
    Check::warn(ID.0, ID.1, found)
        .because("'farside up' lends 1 GiB, and when memory runs out, the system kills processes")
        .remedy(format!("farside up --memory {}MiB", half_in_mib(memory)))
}

/// Returns half of `bytes` in MiB, but at least 8 MiB, which is a node's minimum.
fn half_in_mib(bytes: u64) -> u64 {
    ((bytes / 2) >> 20).max(8)
}

/// Content of the files with the memory limit and the memory use of a control group, in bytes.
#[derive(Clone, Debug, Default)]
struct Group {
    limit: Option<String>,
    used: Option<String>,
}

impl Group {
    /// Reads the files of a control group, of either version.
    fn read(folder: &str) -> Group {
        let either =
            |names: [&str; 2]| names.iter().find_map(|name| super::text(&format!("{folder}/{name}")));
        Group {
            limit: either(["memory.max", "memory.limit_in_bytes"]),
            used: either(["memory.current", "memory.usage_in_bytes"]),
        }
    }
}

fn group(groups: &[Group]) -> Check {
    const ID: (&str, &str) = ("memory.cgroup", "group's memory");
    /// Version 1 of control groups represents "no limit" by a number above this one.
    const NONE: u64 = 1 << 60;
    let number = |text: &Option<String>| text.as_ref().and_then(|text| text.trim().parse::<u64>().ok());
    if groups.iter().all(|group| group.limit.is_none()) {
        return Check::note(ID.0, ID.1, "no limit is visible here");
    }
    let limits = groups.iter().filter_map(|group| Some((number(&group.limit)?, number(&group.used))));
    let left = limits
        .filter(|&(limit, _)| limit < NONE)
        .map(|(limit, used)| (limit.saturating_sub(used.unwrap_or(0)), limit))
        .min();
    let Some((left, limit)) = left else { return Check::ok(ID.0, ID.1, "no limit") };
    let found = format!("{} left of {}", human_bytes(left), human_bytes(limit));
    if left >= GIB {
        return Check::ok(ID.0, ID.1, found);
    }
    Check::warn(ID.0, ID.1, found)
        .because("a node's memory counts towards its group's, and the system kills processes of a group over its limit")
        .remedy(format!(
            "farside up --memory {}MiB, or raise the container's memory limit",
            half_in_mib(left)
        ))
}

/// Checks the number of reserved huge pages. `are_made`: whether the system forms huge pages without a reservation, if
/// that is known.
fn huge(reserved: Option<&str>, free: Option<&str>, are_made: Option<bool>) -> Check {
    const ID: (&str, &str) = ("memory.huge_pages", "huge pages");
    const NEEDED: u64 = GIB / HUGE;
    const WHY: &str = "huge pages make random reads 1.3 to 2 times as fast";
    let number = |text: Option<&str>| text.and_then(|text| text.trim().parse::<u64>().ok());
    let (Some(reserved), Some(free)) = (number(reserved), number(free)) else {
        return Check::unknown(ID.0, ID.1);
    };
    let found = match reserved {
        0 => "none of 2 MiB are reserved".into(),
        _ => format!("{free} of {reserved} of 2 MiB are free"),
    };
    match free {
        NEEDED.. => {
            Check::ok(ID.0, ID.1, format!("{found}: {} to lend", human_bytes(free.saturating_mul(HUGE))))
        }
        _ if are_made == Some(true) => Check::ok(ID.0, ID.1, format!("{found}, and none need be")),
        _ => Check::note(ID.0, ID.1, found).because(WHY).remedy(format!(
            "sysctl -w vm.nr_hugepages={}   (1 GiB)",
            (reserved - free.min(reserved)).saturating_add(NEEDED)
        )),
    }
}

/// Whether this setting gives huge pages to memory that requests them with `madvise`, as a node does. Such a setting
/// works even before Linux 6.1.
fn gives_pages(shmem_enabled: Option<&str>) -> bool {
    let chosen =
        shmem_enabled.and_then(|text| text.split_once('[')?.1.split_once(']')).map(|(chosen, _)| chosen);
    matches!(chosen, Some("always" | "within_size" | "advise" | "force"))
}

/// Judges whether the system forms huge pages without a reservation, as `are_made` says.
fn transparent(are_made: Option<bool>) -> Check {
    const ID: (&str, &str) = ("memory.transparent_huge_pages", "shared huge pages");
    match are_made {
        Some(true) => Check::ok(ID.0, ID.1, "the system forms them as a node's memory is filled"),
        Some(false) => Check::note(ID.0, ID.1, "the system forms none for a node's memory")
            .because("Linux 6.1 and later form them on request, earlier versions only if a setting allows it")
            .remedy("echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        None => Check::unknown(ID.0, ID.1),
    }
}

fn noexec(memfd_noexec: Option<&str>) -> Check {
    const ID: (&str, &str) = ("memory.memfd", "anonymous memory");
    match memfd_noexec.map(str::trim) {
        None | Some("0" | "1") => Check::ok(ID.0, ID.1, "no setting of the system forbids it"),
        Some("2") => Check::fail(ID.0, ID.1, "vm.memfd_noexec is 2")
            .because("so the system refuses to create the memory that a node lends")
            .remedy(
                "sysctl -w vm.memfd_noexec=1, or keep the memory in a file: farside serve --memory-file PATH",
            ),
        Some(_) => Check::unknown(ID.0, ID.1),
    }
}

/// Runs the checks on arbitrary text instead of the system's files.
#[cfg(test)]
pub(super) fn of_any(text: &str) -> Vec<Check> {
    let any = Some(text);
    let groups = [Group { limit: any.map(str::to_owned), used: any.map(str::to_owned) }];
    vec![available(any), group(&groups), huge(any, any, None), noexec(any)]
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;

    #[test]
    fn memory_suffices_if_up_can_lend_its_default() {
        let available_of = |text: &str| available(Some(text));
        let of = |bytes: u64, swap: &str| {
            available_of(&format!("MemTotal: 9 kB\nMemAvailable:    {} kB\n{swap}", bytes >> 10))
        };
        is(&of(4 * GIB, "SwapFree: 1024 kB\n"), Ok, "4.0 GiB available, 1.0 MiB of swap", "");
        is(&of(GIB, ""), Ok, "1.0 GiB", "");
        is(&of(GIB - 1024, ""), Warn, "1024.0 MiB", "--memory 511MiB");
        is(&of(0, ""), Warn, "0 B", "--memory 8MiB");
        for odd in ["", "MemAvailable:", "MemAvailable: much kB", "MemAvailable 5 kB", "MemAvailable: -5 kB"]
        {
            is(&available_of(odd), Note, "not known here", "");
        }
        is(&available_of(&format!("MemAvailable: {} kB", u64::MAX)), Note, "not known here", "");
        is(&available(None), Note, "not known here", "");
    }

    #[test]
    fn the_group_with_the_least_memory_left_counts() {
        let of = |limit: &str, used: &str| Group { limit: Some(limit.into()), used: Some(used.into()) };
        is(&group(&[]), Note, "no limit is visible", "");
        is(&group(&[Group::default(), Group::default()]), Note, "no limit is visible", "");
        is(&group(&[of("max\n", "5\n"), Group::default()]), Ok, "no limit", "");
        is(&group(&[of("9223372036854771712\n", "5\n")]), Ok, "no limit", "");
        is(
            &group(&[of("4294967296\n", "1073741824\n"), of("max\n", "7\n")]),
            Ok,
            "3.0 GiB left of 4.0 GiB",
            "",
        );
        let both = [of("8589934592", "0"), of("1073741824", "536870912")];
        is(&group(&both), Warn, "512.0 MiB left of 1.0 GiB", "--memory 256MiB");
        is(&group(&[of("1048576", "9999999")]), Warn, "0 B left", "--memory 8MiB");
        let unused = Group { limit: Some("1048576".into()), used: None };
        is(&group(&[unused]), Warn, "1.0 MiB left", "--memory 8MiB");
        is(&group(&[of("many", "few")]), Ok, "no limit", "");
    }

    #[test]
    fn the_remedy_adds_huge_pages_to_those_in_use() {
        is(&huge(Some("0\n"), Some("0\n"), Some(false)), Note, "none of 2 MiB", "vm.nr_hugepages=512 ");
        is(
            &huge(Some("600"), Some("512"), Some(false)),
            Ok,
            "512 of 600 of 2 MiB are free: 1.0 GiB to lend",
            "",
        );
        is(&huge(Some("600"), Some("100"), Some(false)), Note, "100 of 600", "vm.nr_hugepages=1012 ");
        is(&huge(Some("1"), Some("18446744073709551615"), Some(false)), Ok, "to lend", "");
        is(&huge(Some("18446744073709551615"), Some("0"), Some(false)), Note, "0 of", "18446744073709551615");
        for (reserved, free) in [(None, None), (Some("5"), None), (None, Some("5")), (Some(""), Some("x"))] {
            is(&huge(reserved, free, None), Note, "not known here", "");
        }
    }

    #[test]
    fn huge_pages_that_the_system_forms_need_no_reservation() {
        is(&huge(Some("0"), Some("0"), Some(true)), Ok, "none of 2 MiB are reserved, and none need be", "");
        is(&transparent(Some(true)), Ok, "forms them", "");
        assert!(gives_pages(Some("always within_size [advise] never deny force\n")));
        for none in [Some("always within_size advise [never] deny force\n"), Some("[deny]"), Some("]["), None]
        {
            assert!(!gives_pages(none), "{none:?}");
        }
        is(&transparent(Some(false)), Note, "forms none", "echo advise");
        is(&transparent(None), Note, "not known here", "");
    }

    #[test]
    fn a_system_that_forbids_anonymous_memory_fails() {
        is(&noexec(None), Ok, "no setting", "");
        is(&noexec(Some("1\n")), Ok, "no setting", "");
        is(&noexec(Some("2\n")), Fail, "is 2", "vm.memfd_noexec=1");
        is(&noexec(Some("3")), Note, "not known here", "");
    }
}
