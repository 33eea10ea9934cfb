//! Checks the CPU: its features, cores, quota, frequency, clock and performance counters.
//!
//! Invariant: information that the system does not provide is not guessed.

use super::check::Check;
use super::system::{Capability, has};

pub(super) fn checks() -> Vec<Check> {
    let text = super::text;
    let status = text("/proc/self/status");
    let groups = super::groups(text("/proc/self/cgroup").as_deref(), "cpu");
    let quotas: Vec<String> = groups.iter().filter_map(|folder| quota_of(folder)).collect();
    let (governors, driver) = governors();
    let clock = "/sys/devices/system/clocksource/clocksource0";
    vec![
        #[cfg(target_arch = "x86_64")]
        features(
            "x86_64",
            std::arch::is_x86_feature_detected!("avx"),
            std::arch::is_x86_feature_detected!("cmpxchg16b"),
        ),
        #[cfg(not(target_arch = "x86_64"))]
        features(std::env::consts::ARCH, false, false),
        cores(status.as_deref(), text("/sys/devices/system/cpu/online").as_deref()),
        quota(&quotas),
        threads(text("/sys/devices/system/cpu/smt/active").as_deref()),
        governor(&governors, driver.as_deref()),
        clock_source(
            text(&format!("{clock}/current_clocksource")).as_deref(),
            text(&format!("{clock}/available_clocksource")).as_deref(),
        ),
        counters(
            text("/proc/sys/kernel/perf_event_paranoid").as_deref(),
            super::names("/sys/bus/event_source/devices").as_deref(),
            status.as_deref().is_some_and(|status| has(status, Capability::Perfmon)),
        ),
    ]
}

/// Returns the CPU quota of a control group of either version, as the text `QUOTA PERIOD`, in microseconds.
fn quota_of(folder: &str) -> Option<String> {
    super::text(&format!("{folder}/cpu.max")).or_else(|| {
        let quota = super::text(&format!("{folder}/cpu.cfs_quota_us"))?;
        let period = super::text(&format!("{folder}/cpu.cfs_period_us"))?;
        Some(format!("{} {}", quota.trim().replace("-1", "max"), period.trim()))
    })
}

/// Returns the names of the cores' frequency governors, each once, and of the first frequency driver.
fn governors() -> (Vec<String>, Option<String>) {
    let folder = "/sys/devices/system/cpu/cpufreq";
    let policies = super::names(folder).unwrap_or_default();
    let of = |file: &str| {
        let texts = policies.iter().filter_map(|policy| super::text(&format!("{folder}/{policy}/{file}")));
        let mut texts: Vec<String> = texts.map(|text| text.trim().to_owned()).collect();
        texts.sort();
        texts.dedup();
        texts
    };
    (of("scaling_governor"), of("scaling_driver").into_iter().next())
}

fn features(architecture: &str, avx: bool, cmpxchg16b: bool) -> Check {
    const ID: (&str, &str) = ("cpu.features", "CPU");
    match (architecture, avx, cmpxchg16b) {
        ("x86_64", true, true) => Check::ok(ID.0, ID.1, "x86-64 with AVX and cmpxchg16b"),
        ("x86_64", has_avx, _) => {
            Check::fail(ID.0, ID.1, format!("x86-64 without {}", if has_avx { "cmpxchg16b" } else { "AVX" }))
                .because("16 bytes cannot be read or swapped atomically")
                .remedy("use a machine that has both, or let the virtual machine use its host's CPU model")
        }
        (other, ..) => Check::note(ID.0, ID.1, other).because("only x86-64 is tested"),
    }
}

/// Counts the numbers in a list such as `0-3,8`, which has 5.
fn count(list: &str) -> Option<u64> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse::<u64>().ok()?, last.trim().parse::<u64>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    ranges.into_iter().try_fold(0u64, |count, range| count.checked_add(range?))
}

fn cores(status: Option<&str>, online: Option<&str>) -> Check {
    const ID: (&str, &str) = ("cpu.cores", "cores");
    let allowed =
        status.and_then(|status| status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")));
    let Some(allowed) = allowed.and_then(count) else { return Check::unknown(ID.0, ID.1) };
    let found = match online.and_then(count) {
        Some(online) if online > allowed => format!("{allowed} of {online}, by this process's affinity"),
        _ => allowed.to_string(),
    };
    match allowed {
        1 => Check::note(ID.0, ID.1, found)
            .because("an engine and its clients alternate on it, and each switch costs a wake-up"),
        _ => Check::ok(ID.0, ID.1, found),
    }
}

fn quota(quotas: &[String]) -> Check {
    const ID: (&str, &str) = ("cpu.quota", "share of cores");
    if quotas.is_empty() {
        return Check::note(ID.0, ID.1, "no quota is visible here");
    }
    let share = |text: &String| {
        let mut numbers = text.split_whitespace().map(|number| number.parse::<f64>().ok());
        let share = numbers.next()?? / numbers.next()??;
        (share > 0.0 && share.is_finite()).then_some(share)
    };
    let Some(share) = quotas.iter().filter_map(share).min_by(f64::total_cmp) else {
        return Check::ok(ID.0, ID.1, "no quota");
    };
    let found = format!("{share:.2} cores, by its control group");
    match share {
        ..1.0 => Check::warn(ID.0, ID.1, found)
            .because("clients poll for responses, and when the quota is spent, all threads stop")
            .remedy("give the container two cores or more"),
        ..2.0 => Check::note(ID.0, ID.1, found).because("a busy engine and a busy client need a core each"),
        _ => Check::ok(ID.0, ID.1, found),
    }
}

fn threads(active: Option<&str>) -> Check {
    const ID: (&str, &str) = ("cpu.smt", "threads of a core");
    match active.map(str::trim) {
        Some("0") => Check::ok(ID.0, ID.1, "one"),
        Some("1") => Check::note(ID.0, ID.1, "several (SMT is on)")
            .because("they share the core, so measurements depend on the other thread's load"),
        _ => Check::unknown(ID.0, ID.1),
    }
}

fn governor(governors: &[String], driver: Option<&str>) -> Check {
    const ID: (&str, &str) = ("cpu.governor", "frequency");
    if governors.is_empty() {
        return Check::unknown(ID.0, ID.1);
    }
    let found = format!("governor {}", governors.join(", "));
    let is_active = driver.is_some_and(|driver| ["intel_pstate", "amd-pstate-epp"].contains(&driver));
    let remedy = "cpupower frequency-set -g performance";
    match governors.iter().any(|governor| governor == "powersave") && !is_active {
        _ if governors.iter().all(|governor| governor == "performance") => Check::ok(ID.0, ID.1, found),
        true => {
            Check::warn(ID.0, ID.1, found).because("the cores stay at their lowest frequency").remedy(remedy)
        }
        false => Check::note(ID.0, ID.1, found)
            .because("the first operations after a pause run at a lower frequency")
            .remedy(remedy),
    }
}

fn clock_source(current: Option<&str>, available: Option<&str>) -> Check {
    const ID: (&str, &str) = ("cpu.clock", "clock");
    let Some(current) = current.map(str::trim).filter(|name| !name.is_empty()) else {
        return Check::unknown(ID.0, ID.1);
    };
    // A process reads these clock sources without a system call.
    let is_fast = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"].contains(&current);
    if is_fast {
        return Check::ok(ID.0, ID.1, current);
    }
    let has_tsc = available.is_some_and(|names| names.split_whitespace().any(|name| name == "tsc"));
    let remedy = match has_tsc {
        true => "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
        false => "dmesg | grep -i -e tsc -e clocksource   (shows why there is no tsc)",
    };
    Check::warn(ID.0, ID.1, current)
        .because("reading the clock may take a system call, and operations read it")
        .remedy(remedy)
}

fn counters(paranoid: Option<&str>, sources: Option<&[String]>, may: bool) -> Check {
    const ID: (&str, &str) = ("cpu.counters", "perf counters");
    let Some(level) = paranoid.and_then(|text| text.trim().parse::<i32>().ok()) else {
        return Check::unknown(ID.0, ID.1).because("the kernel may have no perf events");
    };
    let Some(sources) = sources else { return Check::unknown(ID.0, ID.1) };
    let has_cores = sources.iter().any(|name| {
        let names = ["cpu", "cpu_core"];
        names.contains(&name.as_str()) || name.starts_with("armv8")
    });
    if !has_cores {
        return Check::note(ID.0, ID.1, format!("the CPU provides none; perf_event_paranoid is {level}"))
            .because("'perf stat' counts no cycles and no cache misses, as in most virtual machines");
    }
    if level > 2 && !may {
        return Check::note(ID.0, ID.1, format!("perf_event_paranoid is {level}"))
            .because("'perf' counts nothing for this user")
            .remedy("sysctl -w kernel.perf_event_paranoid=2");
    }
    Check::ok(ID.0, ID.1, format!("the CPU provides them; perf_event_paranoid is {level}"))
}

/// Runs the checks on arbitrary text instead of the system's files.
#[cfg(test)]
pub(super) fn of_any(text: &str) -> Vec<Check> {
    let (any, lines) = (Some(text), text.lines().map(str::to_owned).collect::<Vec<_>>());
    vec![
        cores(any, any),
        quota(&lines),
        threads(any),
        governor(&lines, any),
        clock_source(any, any),
        counters(any, Some(&lines), false),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;

    fn quota_in(texts: &[&str]) -> Check {
        quota(&texts.iter().map(|&text| text.into()).collect::<Vec<_>>())
    }

    #[test]
    fn a_cpu_without_16_byte_atomics_fails() {
        is(&features("x86_64", true, true), Ok, "AVX and cmpxchg16b", "");
        is(&features("x86_64", false, true), Fail, "without AVX", "host's CPU");
        is(&features("x86_64", true, false), Fail, "without cmpxchg16b", "host's CPU");
        is(&features("x86_64", false, false), Fail, "without AVX", "host's CPU");
        is(&features("aarch64", false, false), Note, "aarch64", "");
    }

    #[test]
    fn lists_of_cores_are_counted() {
        let lists = [("0", 1), ("0-3", 4), ("0-3,8", 5), ("1,3,5-6\n", 4), ("0-1023", 1024)];
        for (list, expected) in lists {
            assert_eq!(count(list), Some(expected), "{list}");
        }
        for odd in ["", ",", "3-1", "a", "0-", "-1", "0--3", "0-18446744073709551615"] {
            assert_eq!(count(odd), None, "{odd}");
        }
    }

    #[test]
    fn only_cores_that_this_process_may_use_count() {
        let of = |list: &str, online: Option<&str>| {
            cores(Some(&format!("Name:\tx\nCpus_allowed_list:\t{list}\n")), online)
        };
        is(&of("0-3", Some("0-3")), Ok, "4", "");
        is(&of("0-1", Some("0-3")), Ok, "2 of 4, by this process's affinity", "");
        is(&of("2", Some("0-3")), Note, "1 of 4", "");
        is(&of("0", None), Note, "1", "");
        is(&of("0-1", Some("x")), Ok, "2", "");
        is(&of("none", Some("0-3")), Note, "not known here", "");
        is(&cores(Some("Name:\tx\n"), Some("0-3")), Note, "not known here", "");
        is(&cores(None, Some("0-3")), Note, "not known here", "");
    }

    #[test]
    fn the_group_with_the_smallest_quota_counts() {
        is(&quota_in(&[]), Note, "no quota is visible", "");
        is(&quota_in(&["max 100000\n"]), Ok, "no quota", "");
        is(&quota_in(&["400000 100000\n"]), Ok, "4.00 cores", "");
        is(&quota_in(&["400000 100000\n", "max 100000", "150000 100000"]), Note, "1.50 cores", "");
        is(&quota_in(&["50000 100000"]), Warn, "0.50 cores", "two cores or more");
        is(&quota_in(&["100000 100000"]), Note, "1.00 cores", "");
        for odd in ["", "5", "x y", "5 0", "-5 100000", "0 100000", "NaN 1", "inf 1"] {
            is(&quota_in(&[odd]), Ok, "no quota", "");
        }
    }

    #[test]
    fn smt_is_reported() {
        is(&threads(Some("0\n")), Ok, "one", "");
        is(&threads(Some("1\n")), Note, "SMT is on", "");
        is(&threads(Some("2")), Note, "not known here", "");
        is(&threads(None), Note, "not known here", "");
    }

    #[test]
    fn powersave_is_slow_unless_the_driver_chooses_the_frequency() {
        let of = |names: &[&str], driver| {
            governor(&names.iter().map(|&name| name.into()).collect::<Vec<String>>(), driver)
        };
        is(&of(&["performance"], None), Ok, "performance", "");
        is(&of(&["powersave"], Some("acpi-cpufreq")), Warn, "powersave", "cpupower");
        is(&of(&["powersave"], None), Warn, "powersave", "cpupower");
        is(&of(&["powersave"], Some("intel_pstate")), Note, "powersave", "cpupower");
        is(&of(&["powersave"], Some("amd-pstate-epp")), Note, "powersave", "cpupower");
        is(&of(&["performance", "powersave"], None), Warn, "performance, powersave", "cpupower");
        is(&of(&["schedutil"], None), Note, "schedutil", "cpupower");
        is(&of(&[], Some("intel_pstate")), Note, "not known here", "");
    }

    #[test]
    fn a_clock_that_needs_a_system_call_is_a_warning() {
        for fast in ["tsc\n", "kvm-clock\n", "arch_sys_counter"] {
            is(&clock_source(Some(fast), None), Ok, fast.trim(), "");
        }
        is(&clock_source(Some("hpet\n"), Some("tsc hpet acpi_pm \n")), Warn, "hpet", "echo tsc >");
        is(&clock_source(Some("acpi_pm"), Some("acpi_pm")), Warn, "acpi_pm", "dmesg");
        is(&clock_source(Some("xen"), Some("xen tsc hpet")), Warn, "xen", "echo tsc >");
        is(&clock_source(Some("jiffies"), None), Warn, "jiffies", "dmesg");
        is(&clock_source(Some("\n"), Some("tsc")), Note, "not known here", "");
        is(&clock_source(None, None), Note, "not known here", "");
    }

    #[test]
    fn counters_need_a_cpu_that_provides_them_and_permission() {
        let sources = |names: &[&str]| names.iter().map(|&name| name.into()).collect::<Vec<String>>();
        let of = |level: &str, names: &[&str], may| counters(Some(level), Some(&sources(names)), may);
        let cpu = &["breakpoint", "cpu", "software"];
        is(&of("2\n", cpu, false), Ok, "paranoid is 2", "");
        is(&of("-1\n", cpu, false), Ok, "paranoid is -1", "");
        is(&of("4\n", cpu, false), Note, "paranoid is 4", "perf_event_paranoid=2");
        is(&of("4\n", cpu, true), Ok, "paranoid is 4", "");
        is(&of("2\n", &["cpu_atom", "cpu_core"], false), Ok, "provides them", "");
        is(&of("2\n", &["armv8_pmuv3_0"], false), Ok, "provides them", "");
        is(&of("4\n", &["software", "cpum_cf"], false), Note, "the CPU provides none", "");
        is(&of("high", cpu, true), Note, "not known here", "");
        is(&counters(None, Some(&sources(cpu)), true), Note, "not known here", "");
        is(&counters(Some("2"), None, true), Note, "not known here", "");
    }
}
