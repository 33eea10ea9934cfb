//! CPU time of this process, and of another process by its id.

use std::fs;
use std::io;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of all threads of this process, in user and kernel mode, with a resolution of 1 ns.
///
/// # Errors
/// Never on Linux. The signature is the one of [`cpu_time_of`].
pub fn own_cpu_time() -> io::Result<Duration> {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    used.try_into().map_err(|_| io::Error::other("the kernel reports negative CPU time for this process"))
}

/// Returns the CPU time of all threads of process `pid`, in user and kernel mode, with a resolution of one tick (10
/// ms).
///
/// # Errors
/// `NotFound` if the process does not exist; otherwise the error of reading `/proc/PID/stat`.
pub fn cpu_time_of(pid: u32) -> io::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let ticks = ticks_used(&fs::read_to_string(&path)?).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{path} does not have the format of proc(5)"))
    })?;
    Ok(Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64))
}

/// Returns the sum of `utime` and `stime`, the 14th and 15th field of `stat`. The second field is the program's name
/// in parentheses. This name may contain blanks and parentheses.
fn ticks_used(stat: &str) -> Option<u64> {
    let (_, from_third) = stat.rsplit_once(')')?;
    let mut fields = from_third.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let kernel: u64 = fields.next()?.parse().ok()?;
    user.checked_add(kernel)
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::*;

    #[test]
    fn busy_work_shows_in_both_readers() {
        let (own, by_pid) = (own_cpu_time().unwrap(), cpu_time_of(std::process::id()).unwrap());
        while own_cpu_time().unwrap() - own < Duration::from_millis(60) {
            black_box((0..10_000u64).fold(0, |sum, n| sum ^ n.wrapping_mul(sum | 1)));
        }
        // A tick is at most 10 ms. The threads of other tests may add to both times.
        let grown = cpu_time_of(std::process::id()).unwrap() - by_pid;
        assert!(grown >= Duration::from_millis(30), "{grown:?}");
    }

    #[test]
    fn a_programs_name_may_contain_any_character() {
        let stat = "42 (a) 7 (b c) R 1 2 3 4 5 6 7 8 9 10 700 30 0 0 20";
        assert_eq!(ticks_used(stat), Some(730));
    }

    #[test]
    fn invalid_stat_text_yields_no_time() {
        for stat in [
            "",
            "42 (x",
            "42 (x) R 1",
            "42 (x) R 1 2 3 4 5 6 7 8 9 10 a 30",
            "42 (x) R 1 2 3 4 5 6 7 8 9 10 7",
        ] {
            assert_eq!(ticks_used(stat), None, "{stat}");
        }
        assert_eq!(cpu_time_of(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
