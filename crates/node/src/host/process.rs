//! Facts about processes that the system reports.

/// Start time of a process, in clock ticks since boot. The pid and the start time together identify the process.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22, counted from 1, is the start time. Field 2, the name, may contain anything up to the last parenthesis.
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_has_a_start_time_and_process_0_has_none() {
        assert!(super::start_time(std::process::id()).is_some_and(|ticks| ticks > 0));
        assert_eq!(super::start_time(0), None);
    }
}
