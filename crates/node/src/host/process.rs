//! What the system knows of a process.

/// When a process began, in clock ticks since the machine did: with its pid, that names it for good.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22, counted from 1; the name, field 2, may hold anything up to the last parenthesis.
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_began_and_no_process_0_did() {
        assert!(super::start_time(std::process::id()).is_some_and(|ticks| ticks > 0));
        assert_eq!(super::start_time(0), None);
    }
}
