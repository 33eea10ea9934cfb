//! `cargo xtask verbs`: runs the tests that take an RDMA device, in a virtual machine with one in software.
//!
//! Such tests are `#[ignore]`d, and their module or name is `verbs` or begins with `verbs_`. They run one at a time:
//! some switch the device off, most count what is open at it, and in the virtual machine several at a time are late for
//! their deadlines.
//!
//! Invariant: after all tests, the device has as many queue pairs, completion queues, regions and domains as before.

use crate::lanes::{self, Binary};
use crate::mutants;
use crate::vm::{self, Machine, quoted};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Command line of `cargo xtask verbs`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    /// Runs only the tests named `quick`, which CI runs.
    pub(crate) quick: bool,
    /// Uses an RDMA device of the host instead of the virtual machine. Tests that switch the device off are left out.
    pub(crate) here: bool,
    /// Runs only tests whose name contains this text.
    pub(crate) filter: Option<String>,
}

/// Environment variable by which the tests get the name of the device. Default: the first of the kernel's list.
const DEVICE: &str = "FARSIDE_VERBS_DEVICE";

/// Part of the name of each test that takes an RDMA device.
const NAMED: &str = "verbs";

/// Part of the name of each test that CI runs.
const QUICK: &str = "quick";

/// Part of the name of each test that switches the device off, which only a device of the tests' own can bear.
const UNPLUGS: &str = "unplugged";

/// Parses the command line of `cargo xtask verbs`. The error message says how to correct it.
pub(crate) fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options::default();
    for argument in arguments {
        match argument.as_str() {
            "--quick" => options.quick = true,
            "--here" => options.here = true,
            flag if flag.starts_with('-') => {
                return Err(format!(
                    "unknown flag `{flag}` of `verbs`; it takes --quick, --here and a part of a test's name"
                ));
            }
            filter if options.filter.is_none() => options.filter = Some(filter.into()),
            more => return Err(format!("`verbs` takes one part of a test's name; remove `{more}`")),
        }
    }
    Ok(options)
}

/// Builds the tests, and runs those that take a device. Returns whether all of them passed. It is a failure if there
/// are none.
pub(crate) fn run(root: &Path, options: &Options) -> bool {
    let Some(binaries) = lanes::built(root, mutants::compile_in) else {
        println!("verbs: the tests do not build; see above");
        return false;
    };
    let binaries: Vec<(Binary, Vec<String>)> = binaries
        .into_iter()
        .map(|binary| {
            let tests = listed(&binary, options);
            (binary, tests)
        })
        .filter(|(_, tests)| !tests.is_empty())
        .collect();
    let count: usize = binaries.iter().map(|(_, tests)| tests.len()).sum();
    if count == 0 {
        println!("verbs: no test matches: none is `#[ignore]`d and has all the parts of its name");
        return false;
    }
    println!("verbs: {count} tests");
    let script = script(&binaries);
    let since = Instant::now();
    let passed = match options.here {
        true => Command::new("sh").args(["-c", &script]).status().is_ok_and(|status| status.success()),
        false => in_machine(root, script),
    };
    let outcome = if passed { "passed" } else { "FAILED" };
    println!("verbs: {outcome} in {:.1} s", since.elapsed().as_secs_f64());
    passed
}

/// CI's step: runs the quick tests if the virtual machine is at hand. Returns whether all of them passed.
pub(crate) fn quick(root: &Path) -> bool {
    if !Machine::is_at_hand(root) {
        println!(
            "   not run: QEMU is not installed; `cargo xtask verbs` fetches it, and runs all tests of RDMA"
        );
        return true;
    }
    run(root, &Options { quick: true, ..Options::default() })
}

fn in_machine(root: &Path, script: String) -> bool {
    let options = vm::Options { seconds_max: 3600, ..vm::Options::default() };
    let ran = Machine::prepared(root)
        .and_then(|machine| machine.run(&options, root, &["sh".into(), "-c".into(), script]));
    match ran {
        Ok(code) => code == 0,
        Err(reason) => {
            println!("verbs: nothing was run: {reason}");
            false
        }
    }
}

/// Returns the names of the tests of a binary that are to run.
fn listed(binary: &Binary, options: &Options) -> Vec<String> {
    let listing =
        Command::new(&binary.path).args(["--ignored", "--list"]).current_dir(&binary.folder).output();
    let listing =
        listing.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let names = listing.lines().filter_map(|line| line.strip_suffix(": test"));
    names.filter(|name| is_chosen(name, options)).map(String::from).collect()
}

fn is_chosen(test: &str, options: &Options) -> bool {
    let parts = || test.split("::");
    let takes_device = parts().any(|part| part == NAMED || part.starts_with("verbs_"));
    takes_device
        && (!options.quick || test.contains(QUICK))
        && (!options.here || !test.contains(UNPLUGS))
        && options.filter.as_ref().is_none_or(|filter| test.contains(filter))
}

/// Returns the shell script that runs the tests, and compares what is open at the devices before and after.
fn script(binaries: &[(Binary, Vec<String>)]) -> String {
    let mut script = format!(
        "export {DEVICE}=${{{DEVICE}:-$(ls /sys/class/infiniband | head -n 1)}}\n\
         failed=0; before=$(rdma resource show)\n"
    );
    for (binary, tests) in binaries {
        let folder = quoted(&binary.folder.display().to_string());
        let tests: Vec<String> = tests.iter().map(|test| quoted(test)).collect();
        script += &format!(
            "cd {folder}; CARGO_MANIFEST_DIR={folder} {} --ignored --exact --test-threads=1 --show-output {} \
             || failed=1\n",
            quoted(&binary.path.display().to_string()),
            tests.join(" ")
        );
    }
    // The kernel destroys the queue pairs of a process shortly after the process has ended.
    script += "for second in 1 2 3 4 5 6 7 8 9 10; do\n\
               after=$(rdma resource show); [ \"$after\" = \"$before\" ] && break; sleep 1\n\
               done\n\
               echo \"verbs: open before the tests: $before\"\n\
               echo \"verbs: open after the tests:  $after\"\n\
               [ \"$after\" = \"$before\" ] || { echo 'verbs: not all is closed'; failed=1; }\n\
               exit $failed\n";
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn an_invalid_command_line_names_the_remedy() {
        let filter = Some("kills".into());
        assert_eq!(parsed("--quick kills"), Ok(Options { quick: true, here: false, filter }));
        assert!(parsed("--fast").unwrap_err().contains("--quick, --here"));
        assert!(parsed("a b").unwrap_err().contains("remove `b`"));
    }

    #[test]
    fn tests_are_chosen_by_whole_parts_of_their_names() {
        let all = Options::default();
        assert!(is_chosen("conformance::verbs::core::quick", &all));
        assert!(is_chosen("verbs_device::a_port", &all));
        assert!(!is_chosen("sim::reverbs::soak_all", &all));
        let quick = Options { quick: true, ..Options::default() };
        assert!(is_chosen("verbs::quick::it_works", &quick) && !is_chosen("verbs::it_works", &quick));
        let here = Options { here: true, ..Options::default() };
        assert!(is_chosen("verbs::it_works", &here) && !is_chosen("verbs::unplugged::it_fails", &here));
        let some = Options { filter: Some("works".into()), ..Options::default() };
        assert!(is_chosen("verbs::it_works", &some) && !is_chosen("verbs::it_fails", &some));
    }

    #[test]
    fn the_script_fails_if_a_test_fails_or_something_stays_open() {
        let folder = tempfile();
        let ran = |tests: &str, resources: &str| {
            let path = folder.join("tests");
            std::fs::write(&path, format!("#!/bin/sh\n{tests}\n")).expect("written");
            std::fs::write(folder.join("rdma"), format!("#!/bin/sh\n{resources}\n")).expect("written");
            for name in ["tests", "rdma"] {
                let path = folder.join(name).display().to_string();
                assert!(
                    Command::new("chmod").args(["+x", &path]).status().is_ok_and(|status| status.success())
                );
            }
            let binary =
                Binary { package: "farside".into(), folder: folder.clone(), target: "all".into(), path };
            let script = script(&[(binary, vec!["verbs::one".into()])]).replace("sleep 1", "true");
            let found = format!("{}:/usr/bin:/bin", folder.display());
            let status = Command::new("sh").args(["-c", &script]).env("PATH", found).status();
            status.expect("a shell").success()
        };
        let counted = format!("echo 0: rxe0: qp $(cat {0}/open 2>/dev/null)", folder.display());
        let exact = "[ \"$*\" = '--ignored --exact --test-threads=1 --show-output verbs::one' ]";
        assert!(ran(exact, &counted));
        assert!(!ran("false", &counted));
        assert!(!ran(&format!("echo 7 > {}/open", folder.display()), &counted));
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    fn tempfile() -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("farside-xtask-verbs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }
}
