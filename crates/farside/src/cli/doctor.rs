//! `doctor`: checks which fabrics work on this machine, finds settings that stand in the way, and gives remedies.
//!
//! A check reads files of the system as text, and passes the text to a function that judges it. So tests can use text
//! from any machine.
//! Invariant: `doctor` changes nothing on the machine and needs no privileges. Information that the system does not
//! provide, as in a container, is reported as unknown.

mod check;
mod fabrics;
mod here;
mod memory;
mod network;
mod processor;
mod reach;
mod system;
#[cfg(feature = "verbs")]
mod verbs;

use super::{Done, Failure, StoreTarget};
use check::{Check, Verdict};
use fabrics::Fabric;
use farside::config::{File, forbids_colour};
use std::collections::BTreeSet;
use std::io::{IsTerminal, Read};

/// Check which fabrics work on this machine, which of its settings stand in the way, and how to fix them
#[derive(clap::Args)]
#[command(after_help = "\
Each line has a verdict, the subject of the check, and the finding. Verdicts: ok; note (worth knowing); warn (works, \
but could be better); fail (something of this release does not work). Exits with 0 if no check failed, else with 2. \
With --pool, it only tries to reach that node, step by step, and shows at which step it fails.")]
pub(super) struct Doctor {
    #[command(flatten)]
    target: StoreTarget,
    /// Check only this fabric
    #[arg(long, value_enum, conflicts_with = "pool")]
    fabric: Option<Fabric>,
    /// Print a JSON object a line for each check: id, verdict, what, found, why, remedy, and p50_us if it was measured
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(super) fn run(self) -> Done {
        let mut report = Report {
            json: self.json,
            colour: std::io::stdout().is_terminal() && !forbids_colour(),
            node: None,
            warnings: 0,
            failed: BTreeSet::new(),
        };
        fabrics::handle_file_size_limit()?;
        if let Some(pool) = &self.target.node.pool {
            let settings = self.target.settings().map_err(|failure| match failure {
                Failure::Error(reason) => reason,
                other => unreachable!("invalid settings are a failure with a reason: {other:?}"),
            });
            let (nodes, store) = match reach::selected(settings) {
                Ok(selected) => selected,
                Err(check) => {
                    report.heading(&format!("The way to {pool}"))?;
                    report.print(&check)?;
                    return report.finish("", "the node cannot be reached");
                }
            };
            for node in &nodes {
                report.heading(&format!("The way to {}", node.0))?;
                report.node = (nodes.len() > 1).then(|| node.0.clone());
                reach::checks(node, &store, |check| report.print(&check))?;
            }
            return match nodes.len() {
                1 => report.finish("The node can be reached.", "the node cannot be reached"),
                _ => report.finish("All nodes can be reached.", "not all nodes can be reached"),
            };
        }
        if let Some(fabric) = self.fabric {
            fabrics::checks(fabric, true).iter().try_for_each(|check| report.print(check))?;
            return report.finish("It works here.", "it does not work here");
        }
        report.heading("Fabrics")?;
        for fabric in Fabric::ALL {
            fabrics::checks(fabric, false).iter().try_for_each(|check| report.print(check))?;
        }
        let flags = {
            let StoreTarget { node, store } = self.target;
            File { pool: node.pool, store, token_file: node.token_file, tls_ca: node.tls_ca }
        };
        let sections = [
            ("Kernel and limits", system::checks()),
            ("Cores", processor::checks()),
            ("Memory", memory::checks()),
            ("Network", network::checks()),
            ("This user", here::checks(flags)),
        ];
        for (heading, checks) in sections {
            report.heading(heading)?;
            checks.iter().try_for_each(|check| report.print(check))?;
        }
        report.finish("Everything in this release works here.", "something does not work here")
    }
}

/// Prints the checks' results, and counts their verdicts.
struct Report {
    json: bool,
    colour: bool,
    /// Url of the node that the checks are about, if the pool has several nodes.
    node: Option<String>,
    warnings: usize,
    failed: BTreeSet<&'static str>,
}

impl Report {
    fn heading(&self, text: &str) -> Done {
        match (self.json, self.colour) {
            (true, _) => {}
            (false, true) => print_line!("\x1b[1m{text}\x1b[0m"),
            (false, false) => print_line!("{text}"),
        }
        Ok(())
    }

    fn print(&mut self, check: &Check) -> Done {
        match check.verdict {
            Verdict::Fail => {
                self.failed.insert(check.id);
            }
            Verdict::Warn => self.warnings += 1,
            Verdict::Ok | Verdict::Note => {}
        }
        match self.json {
            true => {
                let mut object = serde_json::to_value(check)?;
                if let Some(node) = &self.node {
                    object["node"] = node.as_str().into();
                }
                print_line!("{object}");
            }
            false => print_line!("{}", check.text(self.colour)),
        }
        Ok(())
    }

    fn finish(self, success: &str, failure: &str) -> Done {
        if !self.failed.is_empty() {
            let failed: Vec<&str> = self.failed.into_iter().collect();
            return Err(Failure::Error(format!(
                "{failure}: {}; the reasons and remedies are above",
                failed.join(", ")
            )));
        }
        if !self.json {
            let warnings = match self.warnings {
                0 => String::new(),
                1 => " One thing could be better: see 'warn'.".into(),
                many => format!(" {many} things could be better: see 'warn'."),
            };
            print_line!("{success}{warnings}");
        }
        Ok(())
    }
}

/// Reads a text file of the system, up to 16 MiB. Returns `None` if the file is missing or cannot be read.
fn text(path: &str) -> Option<String> {
    const BYTES_MAX: u64 = 16 << 20;
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the sorted names in a folder of the system, or `None` if the folder is missing or cannot be read.
fn names(folder: &str) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Some(names)
}

/// Returns the folders of the control groups that limit this process by a controller such as `memory`: its own group
/// and all ancestors, in both versions of control groups. `cgroup` is the content of `/proc/self/cgroup`.
fn groups(cgroup: Option<&str>, controller: &str) -> Vec<String> {
    const ROOT: &str = "/sys/fs/cgroup";
    let mut folders = Vec::new();
    for line in cgroup.unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let root = match controllers {
            "" => ROOT.to_owned(),
            some if some.split(',').any(|name| name == controller) => format!("{ROOT}/{controller}"),
            _ => continue,
        };
        // A path with `..` is outside of the part of the tree that this process can see, so only the root can be read.
        let mut path = if path.contains("..") { "" } else { path.trim_end_matches('/') };
        loop {
            folders.push(format!("{root}{path}"));
            match path.rsplit_once('/') {
                Some((above, _)) => path = above,
                None => break,
            }
        }
    }
    if folders.is_empty() {
        folders.push(ROOT.to_owned());
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts the verdict of a check, a part of its finding, and a part of its remedy. An empty `remedy` asserts that
    /// the check has no remedy.
    #[track_caller]
    pub(super) fn is(check: &Check, verdict: Verdict, found: &str, remedy: &str) {
        assert_eq!(check.verdict, verdict, "{check:?}");
        assert!(check.found.contains(found), "{check:?}");
        match remedy {
            "" => assert_eq!(check.remedy, None, "{check:?}"),
            remedy => {
                assert!(check.remedy.as_ref().is_some_and(|reported| reported.contains(remedy)), "{check:?}")
            }
        }
    }

    #[test]
    fn a_process_is_limited_by_its_group_and_the_groups_ancestors() {
        let of = |text: &str, controller| groups(Some(text), controller);
        assert_eq!(of("0::/\n", "cpu"), ["/sys/fs/cgroup"]);
        assert_eq!(
            of("0::/user.slice/a.scope\n", "cpu"),
            ["/sys/fs/cgroup/user.slice/a.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"]
        );
        let first = "12:cpuset:/x\n5:cpu,cpuacct:/docker/c1\n3:memory:/docker/c1\n1:name=systemd:/x\n";
        assert_eq!(
            of(first, "cpu"),
            ["/sys/fs/cgroup/cpu/docker/c1", "/sys/fs/cgroup/cpu/docker", "/sys/fs/cgroup/cpu"]
        );
        assert_eq!(of(first, "memory")[0], "/sys/fs/cgroup/memory/docker/c1");
        assert_eq!(of("0::/../other\n", "cpu"), ["/sys/fs/cgroup"]);
        for odd in ["", "0", "0:", "x\n\n", "1:devices:/x\n"] {
            assert_eq!(of(odd, "cpu"), ["/sys/fs/cgroup"], "{odd}");
        }
        assert_eq!(groups(None, "cpu"), ["/sys/fs/cgroup"]);
    }

    #[test]
    fn fuzz_files_of_the_system() {
        use crate::cli::fuzz::{self, Change, Executions};
        let executions = Executions::of("files of the system");
        let seeds = [
            "MemAvailable:    1024 kB\nSwapFree: 18446744073709551615 kB\n",
            "18446744073709551615",
            "always within_size advise [never] deny force",
            "50000 100000\nmax 100000\n",
            "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-3,8\n",
            "Max open files            1024                 524288               files\nMax file size unlimited 5\n",
            "   0: 0100007F:1D24 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41001 1\n",
            "6.18.44-generic",
            "0::/user.slice/a.scope\n5:cpu,memory:/docker/../c1\n",
            "powersave\nperformance",
        ];
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let mut bytes = seeds[usize::from(seed) % seeds.len()].as_bytes().to_vec();
            fuzz::change(&mut bytes, &changes);
            let text = String::from_utf8_lossy(&bytes);
            let all = [memory::of_any, processor::of_any, system::of_any, network::of_any];
            #[cfg(feature = "verbs")]
            let all = [&all[..], &[verbs::of_any]].concat();
            for of_any in all {
                for check in of_any(&text) {
                    let reported = check.text(false);
                    let lines = 1 + usize::from(check.remedy.is_some());
                    assert!(reported.lines().count() == lines && !reported.contains('\x1b'), "{reported:?}");
                }
            }
            let folders = groups(Some(&text), "cpu");
            assert!(
                folders.iter().all(|folder| folder.starts_with("/sys/fs/cgroup") && !folder.contains(".."))
            );
        });
    }

    #[test]
    fn a_missing_file_is_unknown_and_nothing_panics() {
        assert_eq!((text("/nowhere/file"), names("/nowhere")), (None, None));
        assert_eq!(text("/proc"), None);
    }
}
