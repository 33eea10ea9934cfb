//! Prepares the virtual machine: Debian packages, an uncompressed kernel, and the kernel's first root.
//!
//! apt works in a folder of its own, so it needs no privileges and changes nothing on the host. A package that the host
//! has already is not fetched, because the guest sees the host's files.
//!
//! Invariant: the folder counts as ready only once everything is complete.

use super::archive::Archive;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names of the kernel and of its first root in the folder of the virtual machine.
pub(super) const KERNEL: &str = "vmlinux";
pub(super) const INITRD: &str = "initrd";

/// Marks a complete folder. The number rises with each change of its contents.
const READY: &str = "ready-1";

/// QEMU, the guest's first programs, the tools for devices, and the user's part of RDMA with its benchmarks.
const PACKAGES: [&str; 8] = [
    "qemu-system-x86",
    "busybox-static",
    "kmod",
    "iproute2",
    "xz-utils",
    "libibverbs1",
    "ibverbs-providers",
    "perftest",
];

/// Files of the packages that take time to unpack and are never used.
const UNNEEDED: [&str; 7] = [
    "./usr/share/doc",
    "./usr/share/man",
    "./lib/modules/*/kernel/sound",
    "./lib/modules/*/kernel/drivers/gpu",
    "./lib/modules/*/kernel/drivers/media",
    "./lib/modules/*/kernel/drivers/staging",
    "./lib/modules/*/kernel/drivers/net/wireless",
];

/// Package that depends on Debian's present kernel.
const KERNEL_PACKAGE: &str = "linux-image-amd64";

/// Kernel modules by which the guest reaches its root.
const MODULES: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];

/// Folder for libraries of Debian's packages on x86-64.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Whether the folder of the virtual machine is complete.
pub(super) fn is_ready(folder: &Path) -> bool {
    folder.join(READY).exists()
}

/// Returns the folder with the files of the packages.
pub(super) fn layer(folder: &Path) -> PathBuf {
    folder.join("layer")
}

/// Returns a command that runs a program of the packages, or the host's if the host had the package.
pub(super) fn tool(folder: &Path, name: &str) -> Command {
    let layer = layer(folder);
    let unpacked = ["usr/bin", "usr/sbin"].map(|place| layer.join(place).join(name));
    match unpacked.iter().find(|path| path.exists()) {
        Some(path) => {
            let mut command = Command::new(path);
            command.env("LD_LIBRARY_PATH", layer.join(LIBRARIES));
            command
        }
        None => Command::new(name),
    }
}

/// Fills the folder of the virtual machine.
///
/// # Errors
/// A package cannot be had, or does not have the expected contents. The message says what to do.
pub(super) fn prepare(folder: &Path) -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the virtual machine runs on x86-64 only; nothing was tried".into());
    }
    let layer = layer(folder);
    remove(&layer)?;
    let packages = Packages { folder: folder.join("apt") };
    packages.fetch()?;
    packages.unpack(&layer)?;
    let version = kernel_version(&layer)?;
    let image = read(&layer.join("boot").join(format!("vmlinuz-{version}")))?;
    write(&folder.join(KERNEL), &uncompressed(folder, &image)?)?;
    // `depmod` is a link to `/bin/kmod`, which leads out of the layer.
    succeed(tool(folder, "kmod").arg0("depmod").arg("-b").arg(layer.join("usr")).arg(&version))?;
    write(&folder.join(INITRD), &first_root(folder, &version)?)?;
    remove(&layer.join("boot"))?;
    remove(&packages.folder)?;
    write(&folder.join(READY), b"")
}

/// Debian packages in apt's private folder.
struct Packages {
    folder: PathBuf,
}

impl Packages {
    /// Fetches all packages that the host lacks.
    fn fetch(&self) -> Result<(), String> {
        for folder in ["lists/partial", "archives/partial"] {
            let folder = self.folder.join(folder);
            std::fs::create_dir_all(&folder)
                .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
        }
        succeed(self.apt("apt-get").arg("update"))?;
        let lacking = "check the host's network and /etc/apt, then run this again";
        let with_advice = |reason: String| format!("{reason}; {lacking}");
        let mut install = self.apt("apt-get");
        install.args(["install", "--download-only", "--no-install-recommends", "--yes"]).args(PACKAGES);
        succeed(&mut install).map_err(with_advice)?;
        let depends = output(self.apt("apt-cache").args(["depends", KERNEL_PACKAGE]))?;
        let kernel =
            kernel_in(&depends).ok_or_else(|| with_advice(format!("no package {KERNEL_PACKAGE}")))?;
        let mut download = self.apt("apt-get");
        download.current_dir(self.folder.join("archives")).args(["download", kernel]);
        succeed(&mut download).map_err(with_advice)
    }

    /// Unpacks the needed files of all packages into `layer`, in which `/bin` and its like are part of `/usr`, as on
    /// the host.
    fn unpack(&self, layer: &Path) -> Result<(), String> {
        std::fs::create_dir_all(layer)
            .map_err(|error| format!("cannot create {}: {error}", layer.display()))?;
        let archives = self.folder.join("archives");
        let entries =
            std::fs::read_dir(&archives).map_err(|error| format!("cannot list packages: {error}"))?;
        for package in entries.flatten().map(|entry| entry.path()) {
            if package.extension() == Some(OsStr::new("deb")) {
                unpack(&package, layer)?;
            }
        }
        Ok(())
    }

    /// Returns a command of apt that keeps all its files in the private folder.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let at = |name: &str| self.folder.join(name).display().to_string();
        for option in [
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::Cache::Archives={}", at("archives")),
            format!("Dir::Cache::pkgcache={}", at("pkgcache.bin")),
            format!("Dir::Cache::srcpkgcache={}", at("srcpkgcache.bin")),
            "Debug::NoLocking=true".into(),
            "APT::Sandbox::User=root".into(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }
}

fn unpack(package: &Path, layer: &Path) -> Result<(), String> {
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--directory").arg(layer);
    // Of names and hard links, but not of the targets of symbolic links.
    tar.arg(r"--transform=flags=rh;s,^\./\(bin\|sbin\|lib\|lib64\)\(/\|$\),./usr/\1\2,");
    tar.args(UNNEEDED.map(|files| format!("--exclude={files}")));
    let mut files = Command::new("dpkg-deb");
    let mut files = files
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| cannot_start("dpkg-deb", &error))?;
    let unpacked = succeed_with(&mut tar, Stdio::from(files.stdout.take().expect("piped")));
    let status = files.wait().map_err(|error| format!("cannot wait for dpkg-deb: {error}"))?;
    unpacked?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("dpkg-deb cannot read {}: {status}", package.display())),
    }
}

/// Returns the name of the kernel's package in the output of `apt-cache depends`.
fn kernel_in(depends: &str) -> Option<&str> {
    depends.lines().find_map(|line| {
        let package = line.trim().strip_prefix("Depends: ")?;
        package.starts_with("linux-image-").then_some(package)
    })
}

/// Returns the version of the one kernel in the layer.
fn kernel_version(layer: &Path) -> Result<String, String> {
    let folder = layer.join("usr/lib/modules");
    let mut names = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let version = names.next().ok_or_else(|| format!("no kernel's modules in {}", folder.display()))?;
    version.into_string().map_err(|name| format!("invalid version of a kernel: {}", name.display()))
}

/// Returns the kernel as QEMU can start it at once. A compressed one takes seconds to unpack itself in the guest.
fn uncompressed(folder: &Path, image: &[u8]) -> Result<Vec<u8>, String> {
    let payload = payload(image).ok_or("the kernel's image has no header of Linux's boot protocol")?;
    if !payload.starts_with(b"\xfd7zXZ\0") {
        // QEMU starts such an image as well.
        return Ok(image.to_vec());
    }
    let mut xz = tool(folder, "xz");
    xz.args(["--decompress", "--stdout", "--single-stream"]);
    let kernel = piped(&mut xz, payload)?;
    match kernel.starts_with(b"\x7fELF") {
        true => Ok(kernel),
        false => Err("the kernel's image contains no ELF file".into()),
    }
}

/// Returns the compressed kernel in an image, by the fields of Linux's boot protocol
/// (`Documentation/arch/x86/boot.rst`).
fn payload(image: &[u8]) -> Option<&[u8]> {
    const SECTOR: usize = 512;
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().expect("4 bytes")) as usize)
    };
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let sectors = match image[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let at = (sectors + 1) * SECTOR + number(0x248)?;
    image.get(at..at.checked_add(number(0x24c)?)?)
}

/// Returns the archive of the kernel's first root: a shell, the script `init`, and the modules to reach the real root.
fn first_root(folder: &Path, version: &str) -> Result<Vec<u8>, String> {
    let modules = layer(folder).join("usr/lib/modules").join(version);
    let list = |name: &str| std::fs::read_to_string(modules.join(name)).unwrap_or_default();
    let order = load_order(&list("modules.dep"), &list("modules.builtin"))?;
    let busybox = PathBuf::from(tool(folder, "busybox").get_program());
    let busybox = if busybox.is_absolute() { busybox } else { Path::new("/usr/bin").join(busybox) };
    let mut archive = Archive::new();
    for name in ["bin", "modules", "proc", "sys", "dev", "root", "layer", "scratch", "new"] {
        archive.folder(name);
    }
    archive.file("bin/busybox", &read(&busybox)?);
    archive.file("init", include_bytes!("init.sh"));
    let mut names = String::new();
    for module in &order {
        let name = module.rsplit('/').next().unwrap_or(module);
        archive.file(&format!("modules/{name}"), &read(&modules.join(module))?);
        names.push_str(name);
        names.push('\n');
    }
    archive.file("modules/order", names.as_bytes());
    Ok(archive.finish())
}

/// Returns the paths of [`MODULES`] and of all that they need, in the order in which they can be loaded. `needs` is the
/// content of `modules.dep`, `built_in` that of `modules.builtin`.
fn load_order(needs: &str, built_in: &str) -> Result<Vec<String>, String> {
    let name_of = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split('.').next().unwrap_or(file).replace('-', "_")
    };
    let lines = needs.lines().filter_map(|line| line.split_once(':'));
    let by_name: HashMap<String, (&str, &str)> =
        lines.map(|(path, needs)| (name_of(path), (path, needs))).collect();
    let mut order: Vec<String> = Vec::new();
    for module in MODULES {
        let Some((path, needs)) = by_name.get(module) else {
            match built_in.lines().any(|path| name_of(path) == module) {
                true => continue,
                false => return Err(format!("the kernel has no module {module}")),
            }
        };
        // The list of each module is complete, and has what must be loaded last at its begin.
        for path in needs.split_whitespace().rev().chain([*path]) {
            if !order.iter().any(|known| known == path) {
                order.push(path.to_owned());
            }
        }
    }
    Ok(order)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Removes a folder, if it exists.
fn remove(folder: &Path) -> Result<(), String> {
    match folder.exists() {
        true => std::fs::remove_dir_all(folder)
            .map_err(|error| format!("cannot remove {}: {error}", folder.display())),
        false => Ok(()),
    }
}

/// Runs a command. On failure, the message contains its output.
fn succeed(command: &mut Command) -> Result<(), String> {
    output(command).map(drop)
}

/// Runs a command with this standard input. On failure, the message contains its output.
fn succeed_with(command: &mut Command, input: Stdio) -> Result<(), String> {
    output_with(command, input).map(drop)
}

/// Runs a command, and returns its output.
fn output(command: &mut Command) -> Result<String, String> {
    output_with(command, Stdio::null())
}

fn output_with(command: &mut Command, input: Stdio) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.stdin(input).output().map_err(|error| cannot_start(&name, &error))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Runs a command with `input`, and returns its output.
fn piped(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, String> {
    let name = command.get_program().display().to_string();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().map_err(|error| cannot_start(&name, &error))?;
    let mut to = child.stdin.take().expect("piped");
    let output = std::thread::scope(|scope| {
        // The command may stop reading before the end of its input.
        scope.spawn(move || to.write_all(input));
        child.wait_with_output()
    });
    match output {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(format!("{name} failed: {}", output.status)),
        Err(error) => Err(format!("cannot read from {name}: {error}")),
    }
}

fn cannot_start(name: &str, error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            format!(
                "{name} is missing: the virtual machine is made of Debian's packages; use Debian 12 on x86-64"
            )
        }
        _ => format!("cannot start {name}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_loaded_after_those_that_they_need() {
        let needs = "kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko\n\
                     kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio.ko\n\
                     kernel/net/9p/9pnet.ko:\n\
                     kernel/fs/overlayfs/overlay.ko:\n";
        let order = load_order(needs, "kernel/drivers/virtio/virtio_pci.ko\n").expect("all modules exist");
        let names: Vec<&str> = order.iter().filter_map(|path| path.rsplit('/').next()).collect();
        assert_eq!(names, ["virtio.ko", "9pnet.ko", "9pnet_virtio.ko", "netfs.ko", "9p.ko", "overlay.ko"]);
        assert!(load_order(needs, "").unwrap_err().contains("virtio_pci"));
    }

    #[test]
    fn a_kernel_is_found_in_its_image_by_the_header() {
        let mut image = vec![0; 0x2000];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x1f1] = 2;
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&5u32.to_le_bytes());
        image[3 * 512 + 16..][..5].copy_from_slice(b"inner");
        assert_eq!(payload(&image), Some(&b"inner"[..]));
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(payload(&image), None);
        assert_eq!(payload(b"no image"), None);
        assert_eq!(payload(&[0; 0x2000]), None);
    }

    #[test]
    fn the_present_kernel_is_the_one_that_the_package_depends_on() {
        let depends = "linux-image-amd64\n  Depends: linux-image-6.1.0-9-amd64\n  Suggests: firmware\n";
        assert_eq!(kernel_in(depends), Some("linux-image-6.1.0-9-amd64"));
        assert_eq!(kernel_in("linux-image-amd64\n"), None);
    }

    #[test]
    fn a_missing_program_names_the_remedy() {
        let missing = succeed(&mut Command::new("farside-no-such-program")).unwrap_err();
        assert!(
            missing.contains("farside-no-such-program is missing") && missing.contains("Debian 12"),
            "{missing}"
        );
        let failed = succeed(Command::new("sh").args(["-c", "echo wrong >&2; exit 3"])).unwrap_err();
        assert!(failed.contains("sh failed: wrong"), "{failed}");
        assert_eq!(piped(&mut Command::new("cat"), b"in and out"), Ok(b"in and out".to_vec()));
    }
}
