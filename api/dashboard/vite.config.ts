import { defineConfig } from "vite";

/** The control plane for `npm run dev`. */
const server = process.env["HOLDFAST_ADDRESS"] ?? "http://127.0.0.1:8642";

export default defineConfig({
  build: {
    outDir: "../holdfast/dashboard",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the content-security policy allows files of this origin only
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    rollupOptions: {
      onwarn: (warning, warn) => {
        if (warning.code !== "MODULE_LEVEL_DIRECTIVE") warn(warning); // "use client" has no meaning here
      },
      output: {
        manualChunks: (id) => {
          if (/node_modules\/(react|react-dom|scheduler|@tanstack|wouter|regexparam|use-sync-external-store)\//.test(id)) return "libraries";
          // The code shared by the views is one chunk: many small files cost more than they save.
          return /\/src\/(api|data|keyboard|routing|theme|ui)\/[^/]+\.tsx?$|\/src\/format\.ts$/.test(id) ? "shared" : undefined;
        },
      },
    },
  },
  server: { proxy: { "/api": { target: server, changeOrigin: true, headers: { origin: server } } } },
});
