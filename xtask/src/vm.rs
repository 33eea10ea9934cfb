//! `cargo xtask vm`: runs a command in a virtual machine with an RDMA device in software (Soft-RoCE).
//!
//! The guest is Debian's own kernel under QEMU. Its root is the host's root, read-only, below an overlay in memory. So
//! a program that was built on the host runs in the guest unchanged, and what it writes is lost with the guest. The
//! device `rxe0` has the address 10.9.0.1 on an interface without a cable.
//!
//! [`prepare`] fetches Debian packages with apt and unpacks them into one folder, so no package is installed on the
//! host. The folder is shown to the guest as a layer between the host's root and the overlay.
//!
//! Invariant: the host's files cannot be changed from the guest, except in the folder that passes the exit code.
//! Invariant: a run ends after its time limit, whatever the guest does.

mod archive;
mod prepare;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Environment variable with the folder of the virtual machine. Default: `vm` in the build's target folder.
const FOLDER: &str = "FARSIDE_VM";

/// Environment variable with QEMU's accelerator. Default: [`SOFTWARE`], which works on every host, but slowly.
const ACCELERATOR: &str = "FARSIDE_VM_ACCEL";

/// Program of the virtual machine.
const QEMU: &str = "qemu-system-x86_64";

/// QEMU's accelerator that needs no hardware support.
const SOFTWARE: &str = "tcg,thread=multi";

/// Arguments of the guest's kernel. On a busy host the emulated timers are late, and a check of them would fail. The
/// kernel may also measure the rate of the CPU's counter wrongly there: its clock was seen to run at seven times the
/// speed of the host's, so that everything was late for its deadline. So the clock is the HPET, whose rate is known.
const KERNEL_ARGUMENTS: &str =
    "console=ttyS0 quiet panic=-1 cryptomgr.notests clocksource=hpet no_timer_check random.trust_cpu=on";

/// Script that runs as process 1 in the guest once its root is mounted.
const GUEST: &str = include_str!("vm/guest.sh");

/// Exit code of a command that was ended at its time limit, as for `timeout`.
pub(crate) const TIMED_OUT: u8 = 124;

/// Exit code if the guest ended without an exit code of the command.
pub(crate) const DIED: u8 = 125;

/// Command line of `cargo xtask vm`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) memory_mib: u64,
    pub(crate) cpus: u64,
    pub(crate) seconds_max: u64,
    /// Command and its arguments; empty to prepare the virtual machine only.
    pub(crate) command: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options { memory_mib: 2048, cpus: 2, seconds_max: 300, command: Vec::new() }
    }
}

/// Parses the command line of `cargo xtask vm`. The error message says how to correct it.
pub(crate) fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let number = match argument.as_str() {
            "--memory" => &mut options.memory_mib,
            "--cpus" => &mut options.cpus,
            "--seconds" => &mut options.seconds_max,
            "--" => {
                options.command = rest.cloned().collect();
                return match options.command.is_empty() {
                    true => Err("no command given after `--`; use for example `vm -- rdma link`".into()),
                    false => Ok(options),
                };
            }
            _ => {
                return Err(format!(
                    "invalid argument `{argument}`; use `vm --memory MIB --cpus N --seconds N -- COMMAND`, or `vm` \
                     alone to prepare the virtual machine"
                ));
            }
        };
        let value = rest.next().and_then(|value| value.parse().ok()).filter(|&value| value > 0);
        *number = value.ok_or_else(|| format!("`{argument}` takes a positive integer"))?;
    }
    Ok(options)
}

/// Prepares the virtual machine if needed, and runs the command in it. Returns the command's exit code.
pub(crate) fn run(root: &Path, options: &Options) -> u8 {
    let ran = Machine::prepared(root).and_then(|machine| match options.command.as_slice() {
        [] => Ok(0),
        command => {
            let here = std::env::current_dir().map_err(|error| format!("no current folder: {error}"))?;
            machine.run(options, &here, command)
        }
    });
    ran.unwrap_or_else(|reason| {
        println!("vm: {reason}");
        DIED
    })
}

/// Returns the folder of the virtual machine.
fn folder(root: &Path) -> PathBuf {
    let target = || std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let folder = std::env::var_os(FOLDER).map_or_else(|| target().join("vm"), PathBuf::from);
    root.join(folder)
}

/// A virtual machine that is ready to boot.
pub(crate) struct Machine {
    folder: PathBuf,
}

impl Machine {
    /// Returns the virtual machine, and first prepares it if its folder is not complete.
    ///
    /// # Errors
    /// Something that it needs is missing. The message says what, and what to do.
    pub(crate) fn prepared(root: &Path) -> Result<Machine, String> {
        let machine = Machine { folder: folder(root) };
        if !prepare::is_ready(&machine.folder) {
            println!("vm: preparing the virtual machine in {}", machine.folder.display());
            let since = Instant::now();
            prepare::prepare(&machine.folder)?;
            println!("vm: prepared in {:.0} s", since.elapsed().as_secs_f64());
        }
        Ok(machine)
    }

    /// Whether the virtual machine is prepared, or can be prepared with the host's QEMU.
    pub(crate) fn is_at_hand(root: &Path) -> bool {
        let is_installed = |folder: PathBuf| folder.join(QEMU).exists();
        let path = std::env::var_os("PATH").unwrap_or_default();
        prepare::is_ready(&folder(root)) || std::env::split_paths(&path).any(is_installed)
    }

    /// Boots the guest, runs `command` as root in `folder`, and prints its output. Returns its exit code, or
    /// [`TIMED_OUT`] or [`DIED`].
    ///
    /// # Errors
    /// QEMU does not start, or a file on the host cannot be written.
    pub(crate) fn run(&self, options: &Options, folder: &Path, command: &[String]) -> Result<u8, String> {
        let shared = Shared::create(&self.folder)?;
        shared.write("stage", GUEST)?;
        shared.write("command", &script(folder, command))?;
        let mut qemu = self.qemu(options, &shared);
        qemu.stdin(Stdio::null());
        let mut child = qemu.spawn().map_err(|error| {
            format!(
                "cannot start {}: {error}; remove {} to prepare it again",
                shown(&qemu),
                self.folder.display()
            )
        })?;
        let deadline = Instant::now() + Duration::from_secs(options.seconds_max);
        let is_over = loop {
            match child.try_wait().map_err(|error| format!("cannot wait for QEMU: {error}"))? {
                Some(status) => break Some(status),
                None if Instant::now() > deadline => break None,
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        if is_over.is_none() {
            child.kill().and_then(|()| child.wait()).map_err(|error| format!("cannot end QEMU: {error}"))?;
        }
        Ok(shared.exit_code(is_over, options))
    }

    fn qemu(&self, options: &Options, shared: &Shared) -> Command {
        let mut qemu = prepare::tool(&self.folder, QEMU);
        let accelerator = std::env::var(ACCELERATOR).unwrap_or_else(|_| SOFTWARE.into());
        qemu.args(["-accel", &accelerator, "-cpu", "max,-erms", "-machine", "pc"]);
        qemu.args(["-smp", &options.cpus.to_string(), "-m", &options.memory_mib.to_string()]);
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        for firmware in ["qemu", "seabios"] {
            qemu.arg("-L").arg(prepare::layer(&self.folder).join("usr/share").join(firmware));
        }
        for firmware in ["qemu", "seabios"] {
            qemu.arg("-L").arg(Path::new("/usr/share").join(firmware));
        }
        qemu.arg("-kernel").arg(self.folder.join(prepare::KERNEL));
        qemu.arg("-initrd").arg(self.folder.join(prepare::INITRD));
        qemu.args(["-append", KERNEL_ARGUMENTS]);
        qemu.arg("-serial").arg(format!("file:{}", shared.console().display()));
        qemu.args(["-serial", "stdio"]);
        let layer = prepare::layer(&self.folder);
        for (tag, path, flags) in [
            ("root", Path::new("/"), ",readonly=on"),
            ("layer", layer.as_path(), ",readonly=on"),
            ("shared", shared.0.as_path(), ""),
        ] {
            // A comma separates QEMU's options, and is doubled in a value.
            let path = path.display().to_string().replace(',', ",,");
            qemu.arg("-fsdev");
            qemu.arg(format!("local,id={tag},path={path},security_model=none,multidevs=remap{flags}"));
            qemu.args(["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
        }
        qemu
    }
}

/// Returns the shell script that runs `command` in `folder`.
fn script(folder: &Path, command: &[String]) -> String {
    let words: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    format!("cd {} && {}\n", quoted(&folder.display().to_string()), words.join(" "))
}

/// Quotes a word for the shell.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn shown(command: &Command) -> String {
    Path::new(command.get_program()).display().to_string()
}

/// Folder that both the host and the guest can write. It is removed when the run is over.
struct Shared(PathBuf);

impl Shared {
    fn create(machine: &Path) -> Result<Shared, String> {
        let folder = machine.join(format!("run-{}", std::process::id()));
        std::fs::create_dir_all(&folder)
            .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
        Ok(Shared(folder))
    }

    fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let path = self.0.join(name);
        std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
    }

    /// Path of the log of the guest's kernel.
    fn console(&self) -> PathBuf {
        self.0.join("console")
    }

    /// Returns the command's exit code, and prints the reason if there is none. `ended`: how QEMU ended, or `None` if
    /// it was ended at the time limit.
    fn exit_code(&self, ended: Option<ExitStatus>, options: &Options) -> u8 {
        let code =
            std::fs::read_to_string(self.0.join("code")).ok().and_then(|code| code.trim().parse().ok());
        match (code, ended) {
            (Some(code), _) => code,
            (None, None) => {
                println!("vm: the command was ended after {} s; use --seconds N", options.seconds_max);
                TIMED_OUT
            }
            (None, Some(status)) => {
                let log = std::fs::read_to_string(self.console()).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let last = lines[lines.len().saturating_sub(20)..].join("\n");
                println!(
                    "vm: the guest ended without an exit code (QEMU: {status}); its last lines:\n{last}"
                );
                DIED
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _gone_already = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn all_words_after_the_dashes_belong_to_the_command() {
        let command = ["rdma", "--memory", "1"].map(String::from).to_vec();
        let expected = Options { memory_mib: 512, seconds_max: 9, command, ..Options::default() };
        assert_eq!(parsed("--memory 512 --seconds 9 -- rdma --memory 1"), Ok(expected));
        assert_eq!(parsed(""), Ok(Options::default()));
    }

    #[test]
    fn an_invalid_command_line_names_the_remedy() {
        assert!(parsed("rdma link").unwrap_err().contains("-- COMMAND"));
        assert!(parsed("--").unwrap_err().contains("vm -- rdma link"));
        for wrong in ["--cpus", "--cpus 0", "--cpus two", "--seconds -1 -- true"] {
            assert!(parsed(wrong).unwrap_err().contains("positive integer"), "{wrong}");
        }
    }

    #[test]
    fn a_command_survives_two_shells() {
        let script = script(Path::new("/a folder"), &["printf".into(), "%s.".into(), "it's $HOME".into()]);
        assert_eq!(script, "cd '/a folder' && 'printf' '%s.' 'it'\\''s $HOME'\n");
        let printed =
            Command::new("sh").args(["-c", script.split_once("&&").expect("two commands").1]).output();
        assert_eq!(String::from_utf8_lossy(&printed.expect("a shell").stdout), "it's $HOME.");
    }
}
